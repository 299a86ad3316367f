"""Images: folders of them, decoding, augmentation."""
