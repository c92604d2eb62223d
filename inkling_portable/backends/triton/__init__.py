"""Offers of the triton backend."""

from inkling_portable.registry import Offer

OFFERS: tuple[Offer, ...] = ()
