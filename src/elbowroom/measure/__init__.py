"""Measurements of a step: bytes from the allocator, and seconds from paired clocks."""

from elbowroom.measure.meter import NoiseMeter as NoiseMeter
from elbowroom.measure.peak import MemoryCurve as MemoryCurve
from elbowroom.measure.peak import mark as mark
from elbowroom.measure.peak import memory_curve as memory_curve
from elbowroom.measure.peak import peak as peak
from elbowroom.measure.roofline import Speed as Speed
from elbowroom.measure.timing import Paired as Paired
from elbowroom.measure.timing import paired as paired
