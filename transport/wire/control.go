package wire

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/name"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
)

// Role is what a node is in the job.
type Role string

// Roles.
const (
	RoleWorker   Role = "worker"
	RoleServer   Role = "server"
	RoleObserver Role = "observer" // asks the scheduler for its status and takes no part
)

// Hello is the first frame on a connection after authentication.
type Hello struct {
	Role  Role   `json:"role"`
	Round uint64 `json:"round,omitempty"` // round of the job (one init to shutdown) that the sender is in; 0 towards the scheduler
	Rank  int    `json:"rank"`            // of a worker
	Conns int    `json:"conns,omitempty"` // how many connections the sender opens to this server
	// Window is the number of consumed tensor bytes after which the server sends a Window, which returns credit; 0 for
	// the server's choice.
	Window uint64 `json:"window,omitempty"`
	Joins  uint32 `json:"joins,omitempty"` // how often all ranks had joined, in Horovod's sense: a server that has joined the job has not counted
}

// Tensor describes one declared tensor: all that a server needs to know to hold its keys.
type Tensor struct {
	ID               uint32         `json:"id"`
	Name             string         `json:"name"`
	Kind             units.Kind     `json:"kind"`
	Op               units.ReduceOp `json:"op"`
	DType            units.DType    `json:"dtype"`
	Shape            []int64        `json:"shape,omitempty"` // the part that is the same on all ranks; for allgather and alltoall without the first dimension
	Root             int            `json:"root,omitempty"`  // broadcast, accumulate: global rank that has the data
	ProcessSet       uint32         `json:"process_set,omitempty"`
	Ranks            []int          `json:"ranks"` // global ranks of the process set, rising
	Prescale         float64        `json:"prescale"`
	Postscale        float64        `json:"postscale"`
	Generation       uint64         `json:"generation,omitempty"` // rises with each failure of the name on every rank, so that its keys start anew
	Parts            []uint32       `json:"parts"`                // bytes of each partition
	Priority         int            `json:"priority,omitempty"`   // at which its results leave a server before others
	Servers          []int          `json:"servers,omitempty"`    // of each partition, for a server that pushes sums of its host there; else none
	options.Declared `json:"options,omitzero"`
}

// Signature is a text with all properties in which ranks must agree, for example "allreduce Sum float32 [10, 4]". Two
// signatures under one name are an error.
func (t *Tensor) Signature() string {
	s := t.Kind.String()
	if t.Kind.HasOp() {
		s += " " + t.Op.String()
	}
	var shape []string
	if t.Kind == units.Allgather || t.Kind == units.Alltoall {
		shape = []string{"*"} // the first dimension may differ
	}
	for _, d := range t.Shape {
		shape = append(shape, strconv.FormatInt(d, 10))
	}
	s += fmt.Sprintf(" %v [%s]", t.DType, strings.Join(shape, ", "))
	if t.Kind == units.Broadcast || t.Kind == units.Accumulate {
		s += fmt.Sprintf(" from rank %d", t.Root)
	}
	if t.Prescale != 1 || t.Postscale != 1 {
		s += fmt.Sprintf(" prescale %g postscale %g", t.Prescale, t.Postscale)
	}
	return s + t.Declared.Signature()
}

// SumsOnHosts reports whether hosts with several ranks may push one sum of the tensor: where sums are only added up to larger
// ones, no model or codec treats ranks one by one, and nothing is scaled down afterwards that may not fit the type before.
func (t *Tensor) SumsOnHosts() bool {
	overflows := t.DType == units.Float16 && (t.Op == units.Product || math.Abs(t.Postscale) < 1)
	return t.Kind == units.Allreduce && t.Op != units.Adasum && !overflows && t.Codec == "" && t.Sync.Model == ""
}

// Bytes is the size of all partitions.
func (t *Tensor) Bytes() (total int64) {
	for _, n := range t.Parts {
		total += int64(n)
	}
	return total
}

// Check reports the first thing about t that is out of bounds.
func (t *Tensor) Check() error {
	if err := name.Check(t.Name); err != nil {
		return fmt.Errorf("tensor with %w", err)
	}
	total := t.Bytes()
	for _, n := range t.Parts {
		if n > limits.MaxPayload {
			return fmt.Errorf("tensor %q: partition of %d bytes, limit %d", t.Name, n, limits.MaxPayload)
		}
	}
	if err := t.Declared.Check(); err != nil {
		return fmt.Errorf("tensor %q: %w", t.Name, err)
	}
	switch {
	case !t.Kind.Valid() || t.Kind.Message() || !t.Op.Valid() || !t.DType.Valid():
		return fmt.Errorf("tensor %q: %v %v %v is not known here", t.Name, t.Kind, t.Op, t.DType)
	case len(t.Shape) > limits.MaxDims:
		return fmt.Errorf("tensor %q: %d dimensions, limit %d", t.Name, len(t.Shape), limits.MaxDims)
	case slices.ContainsFunc(t.Shape, func(d int64) bool { return d < 0 }):
		return fmt.Errorf("tensor %q: shape %v has a negative dimension", t.Name, t.Shape)
	case t.Root < 0 || t.Root >= limits.MaxRanks:
		return fmt.Errorf("tensor %q: root %d is no rank from 0 to %d", t.Name, t.Root, limits.MaxRanks-1)
	case len(t.Parts) == 0 || len(t.Parts) > limits.MaxParts:
		return fmt.Errorf("tensor %q: %d partitions, allowed are 1 to %d", t.Name, len(t.Parts), limits.MaxParts)
	case len(t.Servers) > 0 && len(t.Servers) != len(t.Parts) || slices.ContainsFunc(t.Servers, func(s int) bool { return s < 0 || s >= limits.MaxServers }):
		return fmt.Errorf("tensor %q: %d partitions on servers %v", t.Name, len(t.Parts), t.Servers)
	case total > limits.MaxTensor:
		return fmt.Errorf("tensor %q: %d bytes, limit %d", t.Name, total, int64(limits.MaxTensor))
	}
	return checkRanks(t.Name, t.Ranks)
}

// checkRanks reports the first thing that is out of bounds about the ranks of a tensor's process set.
func checkRanks(tensor string, ranks []int) error {
	if len(ranks) == 0 || len(ranks) > limits.MaxRanks {
		return fmt.Errorf("tensor %q: %d ranks, allowed are 1 to %d", tensor, len(ranks), limits.MaxRanks)
	}
	for i, r := range ranks {
		if r < 0 || r >= limits.MaxRanks || i > 0 && r <= ranks[i-1] {
			return fmt.Errorf("tensor %q: rank %d at place %d of its ranks: want rising numbers under %d", tensor, r, i, limits.MaxRanks)
		}
	}
	return nil
}

// Failure ends one operation on every rank of its process set.
type Failure struct {
	Code       units.FailureCode `json:"code"`
	Name       string            `json:"name"` // "": not a tensor but the join under way
	ProcessSet uint32            `json:"process_set"`
	Generation uint64            `json:"generation"`
	Seq        uint64            `json:"seq"`
	Text       string            `json:"text"`            // names the tensor, the ranks and the signature of each
	Ranks      []int             `json:"ranks,omitempty"` // worker → server: those of the process set, rising
	Late       bool              `json:"late,omitempty"`  // worker → server: the operation's own timeout has passed; the server names the ranks that have not come
}

// Check reports the first thing about what a worker says of an operation that is out of bounds.
func (f *Failure) Check() error {
	if err := name.Check(f.Name); err != nil {
		return fmt.Errorf("failure of a tensor with %w", err)
	}
	return checkRanks(f.Name, f.Ranks)
}

// Condition changes the synchronisation model of tensors in use. Every server concerned gets it twice: first with Try, to
// learn whether the change is possible and how far the ranks are, then with the iteration from which it holds.
type Condition struct {
	ID    uint64   `json:"id"`
	Try   bool     `json:"try,omitempty"`
	At    uint64   `json:"at"`              // the number of closed iterations at which it takes effect on each key
	Names []string `json:"names,omitempty"` // patterns of tensor names; none for every tensor
	Pull  string   `json:"pull,omitempty"`  // model whose pull condition to take, as condition.Parse reads it; "" leaves it
	Push  string   `json:"push,omitempty"`  // the same for the push condition
}

// ConditionReply is a server's answer.
type ConditionReply struct {
	ID     uint64 `json:"id"`
	Error  string `json:"error,omitempty"`
	Keys   int    `json:"keys"`   // that match the names, on this server
	Pushed uint64 `json:"pushed"` // iterations that the furthest rank has pushed of one of them
}

// Stall tells waiting workers which ranks an operation waits for.
type Stall struct {
	Name    string  `json:"name"`
	Waiting []int   `json:"waiting,omitempty"` // ranks that are told; the first logs it
	Missing []int   `json:"missing"`
	Seconds float64 `json:"seconds"` // waited so far
}

// Lost reports a peer whose process ended without a goodbye.
type Lost struct {
	Role  Role   `json:"role"`
	Rank  int    `json:"rank"` // of a worker; index of a server
	Why   string `json:"why"`
	Round uint64 `json:"round,omitempty"` // from which it was lost; 0 from a node: its latest round
	// Silent says, from a node, that it fell silent. It may have gone on elsewhere: a process that has ended closes its connections.
	Silent bool `json:"silent,omitempty"`
	// Drained says that it is no loss: a server of an elastic job that left empty.
	Drained bool `json:"drained,omitempty"`
	// Among is how many servers an elastic job had ever had by then, in a roster to which some have been added: the heirs are among them.
	Among int `json:"among,omitempty"`
}

// Same reports whether two losses are of one peer.
func (l Lost) Same(other Lost) bool { return l.Role == other.Role && l.Rank == other.Rank }

// Node is one member of the job.
type Node struct {
	Role      Role         `json:"role"`
	Rank      int          `json:"rank"`       // rank of a worker, index of a server
	LocalRank int          `json:"local_rank"` // among the workers of its host
	LocalSize int          `json:"local_size"`
	Host      string       `json:"host"`                // name of the machine, for people and for cross ranks
	PID       int          `json:"pid,omitempty"`       // for messages
	Addresses address.List `json:"addresses,omitempty"` // of the server that this node holds; none if it holds none
	HostSums  bool         `json:"host_sums,omitempty"` // that server sums what the workers of its host push, and has no keys
	Version   string       `json:"version,omitempty"`   // release of the node
	// Standby is where a worker of an elastic job is asked for the scheduler when that is missed, host:port; "" where the scheduler stays in its place.
	Standby string `json:"standby,omitempty"`
	Session uint64 `json:"session,omitempty"` // random number of the process, its incarnation; the same after a reconnection to the scheduler
}

// Roster is an epoch of a round (core/membership), the same on every node: its members, those that have joined included, and who of them has gone.
type Roster struct {
	Round     uint64 `json:"round"`               // one init to shutdown of all workers; random start, never reused
	Epoch     uint32 `json:"epoch"`               // its number
	Placement string `json:"placement,omitempty"` // how keys are placed, as core/placement reads it; "" is its default
	Elastic   bool   `json:"elastic,omitempty"`   // the job goes on without a lost worker
	Gone      []Lost `json:"gone,omitempty"`      // members that were lost or drained since the round began, the oldest first
	Workers   []Node `json:"workers"`
	// Servers in the order of their indices. An embedded server has its worker's rank in Rank and
	// Role worker; a dedicated one has Role server.
	Servers []Node `json:"servers"`
	Joined  int    `json:"joined,omitempty"` // how many of them, the last, have joined since the round began
	Left    []int  `json:"left,omitempty"`   // to a server that has joined: ranks that have said goodbye
	// Moved are the keys of an elastic job that were moved from servers that stayed, Moves how often keys were.
	Moved []MovedKey `json:"moved,omitempty"`
	Moves uint32     `json:"moves,omitempty"`
}

// MovedKey is the number of a tensor, one of its partitions, and the index of the server to which that was moved last.
type MovedKey [3]int

// Placed is the scheduler's answer to a declaration: the tensor's number and the server of each partition.
type Placed struct {
	ID      uint32 `json:"id"`
	Servers []int  `json:"servers"` // index in Roster.Servers of each partition; that of partition 0 is the home server of the name
}

// ProcessSet is a numbered set of global ranks; 0 is every rank of the job.
type ProcessSet struct {
	ID    uint32 `json:"id"`
	Ranks []int  `json:"ranks"`
	Found bool   `json:"found,omitempty"` // a worker has asked for it alone: it is no matter of all workers' calls
}

// RemovedSet is a process set that no operation will use any more, in its round.
type RemovedSet struct {
	Round uint64 `json:"round"`
	ID    uint32 `json:"id"`
}

// Control is one message between a node and the scheduler. At most one field beside the first four is set.
// A request has ID > 0, and its answer the same ID.
type Control struct {
	ID       uint64  `json:"id,omitempty"`
	Error    string  `json:"error,omitempty"`        // in an answer: the request was refused, and why
	Missed   bool    `json:"missed,omitempty"`       // beside it: because a node does not come that is needed
	Wait     float64 `json:"wait_seconds,omitempty"` // in a request: time after which the answer is an error that names the missing nodes; 0 for never
	Position uint64  `json:"position,omitempty"`     // AddSet, RemoveID: how many such calls this worker made before in the round

	Register *Register    `json:"register,omitempty"` // node → scheduler; answered by Roster when all have come
	Roster   *Roster      `json:"roster,omitempty"`
	Declare  []Tensor     `json:"declare,omitempty"` // worker → scheduler, without IDs; answered by Placed
	Placed   []Placed     `json:"placed,omitempty"`
	AddSet   []int        `json:"add_set,omitempty"`   // worker → scheduler: every worker asks; answered by Set when all have
	RemoveID uint32       `json:"remove_id,omitempty"` // worker → scheduler: every worker asks; answered when all have
	FindSet  []int        `json:"find_set,omitempty"`  // worker → scheduler: this worker alone asks; answered by Set at once
	Set      *ProcessSet  `json:"set,omitempty"`
	Removed  *RemovedSet  `json:"removed,omitempty"`  // scheduler → dedicated server: every worker has removed this set
	Votes    *Votes       `json:"votes,omitempty"`    // scheduler → worker of an elastic job, for a scheduler that takes over
	Lost     *Lost        `json:"lost,omitempty"`     // node → scheduler: I lost this peer; scheduler → node: the job lost it
	Clock    *Clock       `json:"clock,omitempty"`    // node → scheduler, for timelines; the scheduler answers with its clock
	Bye      bool         `json:"bye,omitempty"`      // node → scheduler: I leave on purpose
	Farewell bool         `json:"farewell,omitempty"` // worker → scheduler: I have said goodbye to the servers, and stay for the one in my process
	Drain    *Drain       `json:"drain,omitempty"`    // observer → scheduler: drain a server, answered when it has left; scheduler → server: you are to leave; server → scheduler: may I, answered when no other is leaving
	Status   *StatusReply `json:"status,omitempty"`   // asked with one without an answer, by `paceline status`
	Progress *Progress    `json:"progress,omitempty"` // scheduler → node: how far are you, with the number alone; node → scheduler: so far
	Profile  *Profile     `json:"profile,omitempty"`  // worker → scheduler: so fast are the servers
	Seat     *Seat        `json:"seat,omitempty"`     // process of an elastic job → its launcher, which has the scheduler; answered by Seat when there is something to say
}

// Drain is a dedicated server's way out of an elastic job, on which nothing is lost.
type Drain struct {
	Server string `json:"server,omitempty"` // of an observer: its index or its address
	Empty  bool   `json:"empty,omitempty"`  // of the server: it has said goodbye to the workers, and reads until they have closed their connections
}

// Profile is what a worker has measured of servers since its report before (PSLD section 4.1): of those with which it has exchanged
// tensors over a connection.
type Profile struct {
	Round   uint64   `json:"round"`
	Servers []Sample `json:"servers"`
}

// Sample is the line that a worker has fitted to its exchanges with one server, without the wait for other workers, and what that was
// fitted to.
type Sample struct {
	Server  int     `json:"server"`        // its index
	Alpha   float64 `json:"alpha"`         // seconds for each byte
	Beta    float64 `json:"beta"`          // seconds of an exchange besides
	Bytes   float64 `json:"bytes"`         // exchanged
	Seconds float64 `json:"seconds"`       // of all these exchanges together
	Error   float64 `json:"error_seconds"` // standard error of a predicted time
}

// Clock compares clocks: Sent is the node's when the question left, which the answer repeats, and Scheduler the scheduler's
// in the answer. Both are nanoseconds of Unix time.
type Clock struct {
	Sent      int64 `json:"sent"`
	Scheduler int64 `json:"scheduler,omitempty"`
}

// Register is a node's request to take part in the next round of the job. After a restart of the scheduler, a registered
// node sends its knowledge of the round with it.
type Register struct {
	Node      Node   `json:"node"`
	Workers   int    `json:"workers"`             // number of workers in the job, 0 if the node does not know
	Dedicated int    `json:"dedicated"`           // number of dedicated servers that the job waits for, 0 if not known
	Placement string `json:"placement,omitempty"` // "round-robin" or "largest-first"; "" is the scheduler's setting
	Elastic   bool   `json:"elastic,omitempty"`   // the job goes on without a lost worker
	// Alike are settings, by name, of which all nodes that state them must have one value (node/settings has the list).
	Alike map[string]string `json:"alike,omitempty"`
	// LauncherRound is the number of the round by the count of a launcher whose job changes its size; 0 under others.
	LauncherRound uint64 `json:"launcher_round,omitempty"`
	Known         *Known `json:"known,omitempty"`
	More          bool   `json:"more,omitempty"` // Known continues in the sender's next register; only the last one is answered
}

// Votes says which workers of an elastic job decide on losses.
type Votes struct {
	Settled []int `json:"settled,omitempty"` // ranks that vote no more: enough voters know of their loss, or they have left
	Ended   []int `json:"ended,omitempty"`   // ranks whose processes have ended: they are on no side of a network
}

// Known is a node's knowledge of the running round, for a restarted scheduler.
type Known struct {
	Roster   Roster       `json:"roster"`
	Tensors  []Tensor     `json:"tensors,omitempty"`
	Placed   []Placed     `json:"placed,omitempty"` // beside Tensors
	Sets     []ProcessSet `json:"sets,omitempty"`
	SetCalls uint64       `json:"set_calls,omitempty"` // AddSet and RemoveID that were answered
	Votes    Votes        `json:"votes,omitzero"`
	Silent   string       `json:"silent,omitempty"`   // where the scheduler was to which this node's line ended because nothing was heard of it; "" where it was closed
	Farewell bool         `json:"farewell,omitempty"` // as Control has it
	LastSet  uint32       `json:"last_set,omitempty"` // the greatest number of a process set that this node has heard of, also of one that is removed
}

// Seat is what a process of a job of changing size asks its launcher, and the answer.
type Seat struct {
	Process int    `json:"process"`           // asked: number that the launcher gave the process
	Watch   bool   `json:"watch,omitempty"`   // asked: for later news than News, instead of a place in the next round
	Early   bool   `json:"early,omitempty"`   // asked: while a round runs, only for the place to expect, which nobody waits for; answer: this is one
	State   bool   `json:"state,omitempty"`   // asked: the process has the state of the training
	Commits uint64 `json:"commits,omitempty"` // asked: how new that is, counted in commits and changes of the hosts; answer: rank 0's
	Skip    bool   `json:"skip,omitempty"`    // asked: its state is that of the others, unless somebody joins; answer: all states are the same
	News    uint64 `json:"news,omitempty"`    // number of the latest news of changed hosts
	Removed bool   `json:"removed,omitempty"` // answer: by these news some processes have to go, and none joins
	// Env is the environment of the process's place; a place in no round has none.
	Env map[string]string `json:"env,omitempty"`
	Why string            `json:"why,omitempty"` // answer: there is no place, for this reason: the process is to end
}

// StatusReply is the state of the scheduler, for people.
type StatusReply struct {
	Detail  bool         `json:"detail,omitempty"`  // of a question: with a report of each node
	State   string       `json:"state,omitempty"`   // "forming" or "running"
	Waiting string       `json:"waiting,omitempty"` // forming: who is missing, and how many have come
	Roster  *Roster      `json:"roster,omitempty"`
	Tensors int          `json:"tensors"`
	Uptime  float64      `json:"uptime_seconds"`
	Nodes   []NodeStatus `json:"nodes,omitempty"`  // the workers by rank, then the dedicated servers by index
	Shares  []Share      `json:"shares,omitempty"` // of all keys, by the index of the server; of an answer with Detail

	Profiles []ServerProfile `json:"profiles,omitempty"` // beside Shares, where workers have measured servers
	Verdict  *Verdict        `json:"verdict,omitempty"`  // of a placement that judges by these profiles, nil before the first one
}

// ServerProfile is what workers have measured of one server: the means over them.
type ServerProfile struct {
	Workers int     `json:"workers"`          // how many have
	Speed   float64 `json:"bytes_per_second"` // of an exchange with one worker
	Seconds float64 `json:"seconds"`          // predicted for a worker's exchange of all bytes that the server has
	Error   float64 `json:"error_seconds"`    // standard error of that
}

// Verdict is what a placement asks for by the profiles of the servers.
type Verdict struct {
	Placement string  `json:"placement"`
	Remap     bool    `json:"remap"` // keys should move from slow servers to others
	Grow      bool    `json:"grow"`  // too few servers are fast: one more is wanted
	Ratio     float64 `json:"ratio"` // of the fastest server's speed to the slowest one's, of those that take keys
}

// Share is what one server has of the keys that the job has declared.
type Share struct {
	Keys  int    `json:"keys"`  // partitions of tensors
	Bytes uint64 `json:"bytes"` // of these partitions
}

// NodeStatus is one node of the roster.
type NodeStatus struct {
	Role     Role      `json:"role"`
	Rank     int       `json:"rank"`            // of a worker; index of a server
	State    string    `json:"state,omitempty"` // "" for a node that has reported; else "no answer", "absent", "left" or StateLost
	Progress *Progress `json:"progress,omitempty"`
}

// StateLost is the state of a node that an elastic job goes on without.
const StateLost = "lost"

// Progress is what a node says of itself when the scheduler asks. A dedicated server counts no operations.
type Progress struct {
	Query      uint64  `json:"query"`               // number of the question
	Seconds    float64 `json:"seconds"`             // since the node joined the round, by its own clock
	Iteration  uint64  `json:"iteration,omitempty"` // how often the tensor was used that has moved the most bytes; unnamed operations that are alike are one
	Tensor     string  `json:"tensor,omitempty"`    // its name, or that of unnamed operations
	Operations uint64  `json:"operations"`          // that have ended
	InFlight   int     `json:"in_flight"`           // that have not
	Bytes      uint64  `json:"bytes"`               // of the input tensors of those that have ended
	Sent       uint64  `json:"sent"`                // tensor bytes, as encoded, to servers in other processes
	Served     uint64  `json:"served,omitempty"`    // payload bytes that the node's server has taken in, from its own process too
	// Suspension is for how long the job's changes of servers have suspended this worker; nil for none.
	Suspension *Suspension `json:"suspension,omitempty"`
	Tuning     *Tuning     `json:"tuning,omitempty"` // nil where no search runs (PACELINE_AUTOTUNE)
	Waits      []Stall     `json:"waits,omitempty"`  // on the node's server, the longest first: at most MaxWaits
}

// Suspension is the longest wait of an exchange that was begun again at another server, from the end of its first attempt to its answer and without the wait
// for other workers' pushes: in the newest epoch with such exchanges, and in all.
type Suspension struct {
	Epoch uint32  `json:"epoch"`
	Last  float64 `json:"last_seconds"`
	Worst float64 `json:"worst_seconds"`
}

// Tuning is how far a worker's search for better settings is.
type Tuning struct {
	Phase    string  `json:"phase"`    // "end" when it is over
	Settings string  `json:"settings"` // the best so far, as variables with values; at the end those that are kept
	Speedup  float64 `json:"speedup"`  // of these by the job's own, as the end has measured it; 1 before
}

// MaxWaits bounds the waits that one node's progress names.
const MaxWaits = 4

// DecodeJSON reads the JSON payload of a frame into v and names the frame in its error. Texts for people, which nodes keep
// and pass on, are cut to limits.MaxText.
func DecodeJSON(t Type, payload []byte, v any) error {
	if err := json.Unmarshal(payload, v); err != nil {
		return fmt.Errorf("bad %v payload: %w", t, err)
	}
	if texts, ok := v.(interface{ cutTexts() }); ok {
		texts.cutTexts()
	}
	return nil
}

func (c *Control) cutTexts() {
	if c.Lost != nil {
		c.Lost.cutTexts()
	}
	if c.Roster != nil {
		c.Roster.cutTexts()
	}
	if p := c.Progress; p != nil {
		p.Tensor = cut(p.Tensor)
		if p.Tuning != nil {
			p.Tuning.Phase, p.Tuning.Settings = cut(p.Tuning.Phase), cut(p.Tuning.Settings)
		}
		p.Waits = p.Waits[:min(len(p.Waits), MaxWaits)]
		for i := range p.Waits {
			w := &p.Waits[i]
			w.Name, w.Missing = cut(w.Name), w.Missing[:min(len(w.Missing), limits.MaxRanks)]
		}
	}
	if r := c.Register; r != nil {
		r.Node.cutTexts()
		if r.Known != nil {
			r.Known.Roster.cutTexts()
		}
	}
}

func (r *Roster) cutTexts() {
	for i := range r.Gone {
		r.Gone[i].cutTexts()
	}
	for i := range r.Workers {
		r.Workers[i].cutTexts()
	}
	for i := range r.Servers {
		r.Servers[i].cutTexts()
	}
}

func (n *Node) cutTexts() { n.Host, n.Version = cut(n.Host), cut(n.Version) }
func (l *Lost) cutTexts() { l.Why = cut(l.Why) }

// cut is the beginning of a text, as far as limits.MaxText allows.
func cut(text string) string {
	if len(text) <= limits.MaxText {
		return text
	}
	return strings.ToValidUTF8(text[:limits.MaxText], "") + "…"
}
