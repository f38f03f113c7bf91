"""Files, memory, threads and processes of the operating system."""
