"""The Spark sink `holdfast`: rows published over MQTT, in order, with repetitions dropped."""
