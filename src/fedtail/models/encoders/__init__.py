"""Pretrained networks that turn images into features, of which only a head is trained and sent."""
