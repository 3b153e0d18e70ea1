"""The nouns of Solaris: ids, events, requests, results, embeddings and the topics that carry them.

Everything here is data and its validation. Nothing here knows Kafka, torch, a clock or the environment.
"""
