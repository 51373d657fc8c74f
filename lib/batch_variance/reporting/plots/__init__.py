"""Plot functions, one module a study: a tidy frame in, a figure out. They draw and compute nothing."""
