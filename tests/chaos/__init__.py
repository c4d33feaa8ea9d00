"""Chaos: the promises, kept by real processes while they are killed, frozen and cut off.

    python -m tests.chaos --seconds 1200 --seed 7

Masters, block servers and clients are processes of their own on loopback; between them stand
proxies that delay, stall, chop and cut. The simulator (`tests.simulation`) reaches
stranger places, and reaches them again. Here nothing is simulated: the kernel, zmq, uvloop, shared
memory and kill -9 are the real ones, and a seed repeats what is done, not what comes of it.
"""
