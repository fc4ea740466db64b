"""What was measured, for people: a page of data, drawn as one HTML file or as a terminal's table.

page    the data: title, rows, curves, settings       svg      curves -> a chart
html    page -> one self-contained file               table    page -> terminal
"""

from elbowroom.report.html import render as render
from elbowroom.report.html import write as write
from elbowroom.report.page import Curve as Curve
from elbowroom.report.page import Page as Page
from elbowroom.report.page import Row as Row
from elbowroom.report.table import table as table
