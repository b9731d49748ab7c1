"""The checks behind `ms-accum selftest`: is accumulation exact on this device, and what does it cost?"""
