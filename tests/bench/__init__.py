"""What capture and reading cost, as ratios taken in one run: `./justw bench`."""
