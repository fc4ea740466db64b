"""ADAPTATION: what changes settings while a training runs."""

from elbowroom.control.fitting import Fitting as Fitting
