"""Tables of offers. The order in which they are read: own vendor, triton, reference."""
