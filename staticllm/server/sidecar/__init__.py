"""What a desktop application needs to run the server beside itself, and a worker process that may crash."""
