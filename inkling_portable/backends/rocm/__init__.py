"""Offers of the rocm backend."""

from inkling_portable.registry import Offer

OFFERS: tuple[Offer, ...] = ()
