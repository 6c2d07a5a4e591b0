"""Commands that look at what is there: files, engines, runs beside each other."""
