"""A real Apache Kafka on this machine, without Docker and without a Java of its own: `with Broker.start(dir) as b:`.

jars.py (what to run) → properties.py (how to run it) → place.py (where) → process.py (running it).
"""

from solaris.broker.process import DEFAULT_DATA_DIR, Broker
from solaris.broker.properties import BrokerOptions, BrokerSecurity

__all__ = ["DEFAULT_DATA_DIR", "Broker", "BrokerOptions", "BrokerSecurity"]
