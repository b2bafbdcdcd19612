"""draftmill: a build that turns prompts into a measured speculative-decoding drafter for a target model."""

__version__ = "0.1.0"
