"""Handles, which autograd holds instead of saved tensors.

Every handle can `restore` the whole storage, any number of times.

handle          holds                                   restore()
KeepHandle      the tensor itself                       the tensor, after a version check
EncodeHandle    an `Encoded`                            decodes; or the original, if something else
                                                        keeps it alive
MovedCodeHandle an `Encoded` without its largest        fetches that buffer, and decodes
                buffer, and a ticket for it
OffloadHandle   a ticket of another tier                brings the bytes back; or the original, as
                                                        above
DropHandle      nothing                                 never: the forward only counted
RebuildHandle   a recipe and the handles it starts at   runs the recipe
CastHandle      a parameter, which exists anyway        casts it again
"""

from elbowroom.runtime.handles.cast import CastHandle as CastHandle
from elbowroom.runtime.handles.encode import EncodeHandle as EncodeHandle
from elbowroom.runtime.handles.encode import MovedCodeHandle as MovedCodeHandle
from elbowroom.runtime.handles.offload import OffloadHandle as OffloadHandle
from elbowroom.runtime.handles.rebuild import RebuildHandle as RebuildHandle
from elbowroom.runtime.slot import DropHandle as DropHandle
from elbowroom.runtime.slot import Handle as Handle
from elbowroom.runtime.slot import KeepHandle as KeepHandle
