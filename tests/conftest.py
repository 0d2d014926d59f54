"""Fixtures for all tests."""

pytest_plugins = ("tests.te_fixture",)
