"""What is known about the served models, also about those that are not loaded, and LM Studio's and llama.cpp's lists of it."""
