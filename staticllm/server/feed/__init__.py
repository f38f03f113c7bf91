"""What the engines do, call by call, for the page and for others that watch."""
