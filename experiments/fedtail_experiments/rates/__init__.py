"""Rate strategies that only experiments compare with, one file each; entry points name them."""
