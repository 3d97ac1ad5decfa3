"""From pages on a device to fragments in a store, through a fixed pool of host memory."""
