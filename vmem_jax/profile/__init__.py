"""profile: the measured machine and the measured steps of a program, kept between runs."""
