"""Engines that generate: one small interface, one file each."""
