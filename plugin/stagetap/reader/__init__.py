"""From a store back to samples."""
