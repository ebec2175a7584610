"""Servers that speak the metadata protocols of Google Cloud, Azure and Alibaba Cloud."""
