"""Records of device calls and requests; statistics, traces and pictures of them."""
