"""WINDVE: queues of embedding requests on several devices, and how long they may be."""
