"""Applications of the library. The library imports none of them; they import each other only for plots and traces."""
