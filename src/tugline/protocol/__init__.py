"""Messages between server, nodes and clients: the bodies of the API under ``/v1``.

Every message is a frozen struct, so one definition serves the HTTP bodies, their OpenAPI schema
and calls inside one process. Times are Unix seconds, durations seconds. A `position` numbers
events in commit order; it never repeats or goes back, so "after position N" is a cursor that
survives every restart (I3).

`Dispatcher` is all that a node needs of a server, over HTTP or in the same process.
"""

from tugline.protocol.events import Delivery as Delivery
from tugline.protocol.events import DeliveryState as DeliveryState
from tugline.protocol.events import Event as Event
from tugline.protocol.events import EventKind as EventKind
from tugline.protocol.events import WebhookBody as WebhookBody
from tugline.protocol.leases import LEASE_WAIT_S as LEASE_WAIT_S
from tugline.protocol.leases import Commit as Commit
from tugline.protocol.leases import CommitOutcome as CommitOutcome
from tugline.protocol.leases import Dispatcher as Dispatcher
from tugline.protocol.leases import HeldSession as HeldSession
from tugline.protocol.leases import LeaseRequest as LeaseRequest
from tugline.protocol.leases import LeaseResponse as LeaseResponse
from tugline.protocol.leases import Release as Release
from tugline.protocol.leases import Renewal as Renewal
from tugline.protocol.leases import Stop as Stop
from tugline.protocol.leases import StopKind as StopKind
from tugline.protocol.leases import Work as Work
from tugline.protocol.nodes import Barrier as Barrier
from tugline.protocol.nodes import Control as Control
from tugline.protocol.nodes import NodeRegistered as NodeRegistered
from tugline.protocol.nodes import NodeRegistration as NodeRegistration
from tugline.protocol.nodes import NodeState as NodeState
from tugline.protocol.nodes import NodeView as NodeView
from tugline.protocol.nodes import Pause as Pause
from tugline.protocol.nodes import PauseMode as PauseMode
from tugline.protocol.nodes import Version as Version
from tugline.protocol.problems import Problem as Problem
from tugline.protocol.results import Ack as Ack
from tugline.protocol.results import Consumer as Consumer
from tugline.protocol.results import Results as Results
from tugline.protocol.results import ResultView as ResultView
from tugline.protocol.tasks import Accepted as Accepted
from tugline.protocol.tasks import Cancelled as Cancelled
from tugline.protocol.tasks import Counts as Counts
from tugline.protocol.tasks import Page as Page
from tugline.protocol.tasks import SessionView as SessionView
from tugline.protocol.tasks import TaskState as TaskState
from tugline.protocol.tasks import TaskView as TaskView
