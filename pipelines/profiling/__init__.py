"""Records of steps and requests, and pictures of them."""
