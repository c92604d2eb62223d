"""Offers of the cuda backend."""

from inkling_portable.registry import Offer

OFFERS: tuple[Offer, ...] = ()
