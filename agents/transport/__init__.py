"""Micro-batches through Faust: a driver that hands over one record batch per partition and poll, and commits by our own ledger.

driver.py    the Faust transport: aiokafka's, with our consumer
consumer.py  the consumer: polls, seeks, revocations, commits (what Faust calls)
fetch.py     the consumer thread: what aiokafka fetched, as record batches
batch.py     RecordBatch: the records of one poll of one partition
ledger.py    which batches are in flight, and how far a partition may be committed (pure)
runner.py    one batch at a time to its partition's processor; bisects on errors
output.py    the one producer: bounded, acknowledged before anything is committed
partition.py what a shell implements: PartitionProcessor
"""
