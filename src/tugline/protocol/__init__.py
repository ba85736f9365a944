"""Messages between server, nodes and clients: the bodies of the API under ``/v1``.

Every message is a frozen struct, so one definition serves the HTTP bodies, their OpenAPI schema
and calls inside one process. Times are Unix seconds, durations seconds. A `position` numbers
events in commit order; it never repeats or goes back, so "after position N" is a cursor that
survives every restart (I3).

`Dispatcher` is all that a node needs of a server, over HTTP or in the same process.
"""

from tugline.protocol.clients import PROBLEM as PROBLEM
from tugline.protocol.clients import Accepted as Accepted
from tugline.protocol.clients import Ack as Ack
from tugline.protocol.clients import Cancelled as Cancelled
from tugline.protocol.clients import Consumer as Consumer
from tugline.protocol.clients import Counts as Counts
from tugline.protocol.clients import Delivery as Delivery
from tugline.protocol.clients import DeliveryState as DeliveryState
from tugline.protocol.clients import Event as Event
from tugline.protocol.clients import EventKind as EventKind
from tugline.protocol.clients import Page as Page
from tugline.protocol.clients import Problem as Problem
from tugline.protocol.clients import Results as Results
from tugline.protocol.clients import ResultView as ResultView
from tugline.protocol.clients import SessionView as SessionView
from tugline.protocol.clients import TaskState as TaskState
from tugline.protocol.clients import TaskView as TaskView
from tugline.protocol.clients import WebhookBody as WebhookBody
from tugline.protocol.nodes import LEASE_WAIT_S as LEASE_WAIT_S
from tugline.protocol.nodes import Barrier as Barrier
from tugline.protocol.nodes import Commit as Commit
from tugline.protocol.nodes import CommitOutcome as CommitOutcome
from tugline.protocol.nodes import Control as Control
from tugline.protocol.nodes import Dispatcher as Dispatcher
from tugline.protocol.nodes import HeldSession as HeldSession
from tugline.protocol.nodes import LeaseRequest as LeaseRequest
from tugline.protocol.nodes import LeaseResponse as LeaseResponse
from tugline.protocol.nodes import NodeRegistered as NodeRegistered
from tugline.protocol.nodes import NodeRegistration as NodeRegistration
from tugline.protocol.nodes import NodeState as NodeState
from tugline.protocol.nodes import NodeView as NodeView
from tugline.protocol.nodes import Pause as Pause
from tugline.protocol.nodes import PauseMode as PauseMode
from tugline.protocol.nodes import Release as Release
from tugline.protocol.nodes import Renewal as Renewal
from tugline.protocol.nodes import Stop as Stop
from tugline.protocol.nodes import StopKind as StopKind
from tugline.protocol.nodes import Version as Version
from tugline.protocol.nodes import Work as Work
