int shown() { return 1; }
