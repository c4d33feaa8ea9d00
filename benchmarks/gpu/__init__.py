"""`make gpu-acceptance`: what is true of device memory on this machine."""
