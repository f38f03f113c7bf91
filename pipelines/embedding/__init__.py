"""Embeds texts on one device or on several together: WINDVE's queue manager, queue depths, devices and cores."""
