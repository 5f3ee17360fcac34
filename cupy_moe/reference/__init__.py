"""NumPy reference of the operations: the oracle of the tests and the backend for host arrays.

``routing`` and ``finalize`` hold the steps before and after the GEMMs, ``stages`` the GEMMs with
what surrounds them, ``number_format`` and ``activation`` what differs between operations, and
``moe`` the two layers. Codes travel as raw bytes (uint8; BF16 as uint16), sums are float64, and
values are rounded exactly where the operations round.
"""
