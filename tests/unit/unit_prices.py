"""Prices for tests, in one line."""

from outlast.prices import Prices, parse_prices


def priced(spot="", on_demand=""):
    """Each as ``outlast.toml`` takes it."""
    return Prices(spot=parse_prices(spot), on_demand=parse_prices(on_demand))
