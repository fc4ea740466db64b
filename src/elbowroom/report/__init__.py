"""Reports: a page of data, as one HTML file or as a table in the terminal.

page     the data: title, rows, curves, settings     table   page -> terminal
html     page -> one self-contained file             chart   bands, curves -> input of chart.js
profile  a profiled step -> its page, its table      step    a step as profiled, or under a plan
bands    the memory of a step by category and by module
snapshot a memory snapshot of PyTorch -> its page
"""

from elbowroom.report.html import render as render
from elbowroom.report.html import render_profile as render_profile
from elbowroom.report.html import write as write
from elbowroom.report.page import Curve as Curve
from elbowroom.report.page import Page as Page
from elbowroom.report.page import ReportRow as ReportRow
from elbowroom.report.page import table as table
from elbowroom.report.profile import profile_table as profile_table
from elbowroom.report.profile import step_page as step_page
from elbowroom.report.snapshot import snapshot_page as snapshot_page
