"""OpenVINO's classes as an attached program sees them."""
