"""Where memory goes when it leaves the device's budget: stores in memory, in files, compressed, one below the other."""
