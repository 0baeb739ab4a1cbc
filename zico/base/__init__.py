"""What every layer uses: units, errors, paths, settings, records, and how Numba is used."""
