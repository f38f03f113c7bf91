"""Child processes: how they are started, asked, watched and ended."""
