package settings

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/limits"
)

// Setting is one row of the table of settings, for people.
type Setting struct {
	Name     string   // PACELINE_...
	Synonyms []string // other variables that are honoured, the first that is set wins
	Default  string
	Allowed  string
	Shared   bool // all workers of a job must have one value
	Doc      string
}

// Value is the value of a setting in one process.
type Value struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	From  string `json:"from"` // variable that gave it, or "default"
}

// Table lists every setting, those about the process's place in the job first.
func Table() []Setting {
	rows := identityRows()
	for _, r := range table {
		names := each.Of(r.synonyms, func(s synonym) string { return s.name })
		rows = append(rows, Setting{r.name, names, r.preset, r.kind.allowed, r.kind.shared != own, r.doc})
	}
	return rows
}

// Values lists the settings of this process and where each came from. Secrets are not among them.
func (s *Settings) Values() []Value {
	values := s.identityValues()
	for _, r := range table {
		text := r.kind.show(s)
		if r.name == "PACELINE_JOB_SECRET" && len(s.JobSecret) > 0 {
			text = "(set)"
		}
		values = append(values, Value{r.name, text, s.from(r.name)})
	}
	return values
}

// Alike lists the settings, with their values, that must agree with those of other processes in the job.
func (s *Settings) Alike() map[string]string {
	list := map[string]string{}
	for _, r := range table {
		if r.kind.shared.among(s) {
			list[r.name] = r.kind.show(s)
		}
	}
	return list
}

func (s *Settings) from(name string) string {
	if variable := s.From[name]; variable != "" {
		return variable
	}
	return "default"
}

// A row describes one setting.
type row struct {
	name     string
	synonyms []synonym
	preset   string // the default, as the variable would give it
	kind     kind
	doc      string
}

// A synonym is another system's variable. convert translates a value whose meaning differs; ok is false for a value
// without a counterpart.
type synonym struct {
	name    string
	convert func(s *Settings, text string) (value string, ok bool)
}

func same(names ...string) []synonym {
	return each.Of(names, func(name string) synonym { return synonym{name: name} })
}

var table = []row{
	{"PACELINE_ROLE", []synonym{{"DMLC_ROLE", nil}}, "worker", choice(func(s *Settings) *string { return &s.Role }, "worker", "server", "scheduler"),
		"What this process is; `paceline server` and `paceline scheduler` set it themselves."},
	{"PACELINE_SCHEDULER", nil, "", addresses(func(s *Settings) *string { return &s.Scheduler }, limits.MaxSchedulers),
		"Address of the scheduler, or all addresses at which it may be started again when it is lost. By default rank 0 runs it, at MASTER_ADDR. DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT are honoured."},
	{"PACELINE_PORT", nil, "0", integer(func(s *Settings) *int { return &s.Port }, 0, 65535),
		"Port of a scheduler that rank 0 runs. By default one from 16384 to 32767, derived from MASTER_PORT (29500 gives 29501) or from the launcher's job number."},
	{"PACELINE_INTERFACE", same("HOROVOD_GLOO_IFACE", "DMLC_NODE_HOST", "DMLC_INTERFACE"), "", text(func(s *Settings) *string { return &s.Interface }, "names such as eth0, or addresses; the first that this machine has is used"),
		"Interface that the job uses. By default loopback for a local job, else the one towards the scheduler."},
	{"PACELINE_HOST", same("HOROVOD_HOSTNAME"), "", text(func(s *Settings) *string { return &s.Host }, "a name"),
		"Name of this machine; ranks with the same name are local to each other. By default the machine's own."},
	{"PACELINE_JOB_SECRET", nil, "", secretKind,
		"A secret shared by the job's processes. Needed over several hosts; `paceline run` makes one."},
	{"PACELINE_JOB_SECRET_FILE", nil, "", text(func(s *Settings) *string { return &s.SecretFile }, "a path"),
		"File with the secret, which nobody but its owner may read."},
	{"PACELINE_TLS_CERT", nil, "", text(func(s *Settings) *string { return &s.TLSCert }, "a path"), "Certificate of this node (PEM). With it, every connection uses TLS 1.3."},
	{"PACELINE_TLS_KEY", nil, "", text(func(s *Settings) *string { return &s.TLSKey }, "a path"), "Its private key (PEM), which nobody but its owner may read."},
	{"PACELINE_TLS_CA", nil, "", text(func(s *Settings) *string { return &s.TLSCA }, "a path"), "Authorities that sign the certificates of the other nodes (PEM)."},
	{"PACELINE_INTEGRITY", nil, "", choice(func(s *Settings) *string { return &s.Integrity }, "control", "all"),
		"What is authenticated on connections without TLS, so that nobody on the way can change it: control messages, frame headers and objects (control), or tensors, too (all). Without it, all between hosts and control inside one. Where the two ends of a connection differ, all holds."},
	{"PACELINE_SERVERS", []synonym{{"BYTEPS_ENABLE_MIXED_MODE", ifTrue("both")}, {"DMLC_NUM_SERVER", ifPositive("dedicated")}}, "embedded",
		choice(func(s *Settings) *string { return &s.Servers }, "embedded", "dedicated", "both"),
		"Where gradients are summed: in the workers, in processes started by `paceline server`, or in both."},
	{"PACELINE_NUM_SERVERS", same("DMLC_NUM_SERVER"), "0", integer(func(s *Settings) *int { return &s.NumServers }, 0, limits.MaxServers),
		"Dedicated servers to wait for; 0 leaves it to the scheduler."},
	{"PACELINE_HOST_SUMS", nil, "1", boolean(func(s *Settings) *bool { return &s.HostSums }),
		"Several workers of one host, where all servers are on others, sum among themselves first: each byte crosses the host's link once in each direction. Plain sums under BSP alone, and not in elastic jobs."},
	{"PACELINE_PLACEMENT", nil, "", policy(func(s *Settings) *string { return &s.Placement }),
		"How tensors are cut and placed on servers (docs/placement.md). By default the scheduler's choice, largest-first."},
	{"PACELINE_PLACEMENT_PERIOD", nil, "5s", duration(func(s *Settings) *time.Duration { return &s.PlacementPeriod }, 0, maxTime),
		"Time between two reports of a worker on how fast it exchanges tensors with each server. `paceline servers` shows them, and the placements psld and proportional judge by them; 0 for none."},
	{"PACELINE_ELASTIC", nil, "0", among(nodes, boolean(func(s *Settings) *bool { return &s.Elastic })),
		"The job goes on without workers and servers that are lost (docs/elastic.md)."},
	{"PACELINE_PARTITION_BYTES", same("BYTEPS_PARTITION_BYTES"), "", among(workers, size(func(s *Settings) *int64 { return &s.PartitionBytes }, limits.MinPartition, limits.MaxPartition)),
		"Larger tensors are cut into partitions of this size. By default 4 MiB, with workers on several hosts 512 KiB, and with dedicated servers 256 KiB."},
	{"PACELINE_FUSION_BYTES", []synonym{{"HOROVOD_FUSION_THRESHOLD", atMost(limits.MaxFused)}}, "64KiB", among(searchers, size(func(s *Settings) *int64 { return &s.FusionBytes }, 0, limits.MaxFused)),
		"Tensors and partitions of up to this size that are ready at the same time share a frame of up to 256 KiB; 0 sends each alone. Larger values of Horovod's variable become the upper bound."},
	{"PACELINE_CREDIT_BYTES", []synonym{{"BYTEPS_SCHEDULING_CREDIT", partitions}}, "16MiB", among(searchers, size(func(s *Settings) *int64 { return &s.CreditBytes }, limits.MinPartition, 1<<40)),
		"Bytes in flight to one server. An urgent tensor waits behind at most this many. BytePS counts in partitions."},
	{"PACELINE_CONNECTIONS", nil, "1", among(searchers, integer(func(s *Settings) *int { return &s.Connections }, 1, limits.MaxConnsPerServer)),
		"Connections from a worker to each server."},
	{"PACELINE_AUTOTUNE", same("HOROVOD_AUTOTUNE"), "0", among(workers, boolean(func(s *Settings) *bool { return &s.Autotune })),
		"Searches for the fastest partition size, credit, batch and connections while training runs, from the values that the job has, and keeps what it finds faster."},
	{"PACELINE_AUTOTUNE_LOG", same("HOROVOD_AUTOTUNE_LOG"), "", text(func(s *Settings) *string { return &s.AutotuneLog }, "a path"),
		"File in which rank 0 writes a line of comma-separated values for each trial of the search."},
	{"PACELINE_AUTOTUNE_WARMUP_SAMPLES", same("HOROVOD_AUTOTUNE_WARMUP_SAMPLES"), "3", among(workers, integer(func(s *Settings) *int { return &s.AutotuneWarmup }, 0, 1000)),
		"Trials at the beginning that are not measured, at least one."},
	{"PACELINE_AUTOTUNE_STEPS_PER_SAMPLE", same("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"), "10", among(workers, integer(func(s *Settings) *int { return &s.AutotuneSteps }, 1, 1000000)),
		"Steps of each trial. The first two of them are not measured."},
	{"PACELINE_TRANSPORT", nil, "local", choice(func(s *Settings) *string { return &s.Transport }, "auto", "local", "tcp", "shm", "fabric"),
		"What carries tensors: shared memory between processes of one user on one host, where the machine has it (local); the same, and an error where it has not (shm); tcp alone; an RDMA fabric between hosts (fabric); or each of them where the machine has it (auto). TCP reaches all others. With TLS everything goes over TCP."},
	{"PACELINE_SHM_RING", nil, "512KiB", size(func(s *Settings) *int64 { return &s.ShmRing }, limits.MinRing, limits.MaxRing),
		"Bytes of shared memory for each direction of a connection, rounded up to a power of two. Connections of a server beyond 256 MiB have less."},
	{"PACELINE_FABRIC", nil, "", text(func(s *Settings) *string { return &s.Fabric }, "a provider of libfabric, such as verbs;ofi_rxm or efa"),
		"libfabric's provider for the fabric. By default the first one with hardware; `paceline info` lists them."},
	{"PACELINE_SEND_BUFFER", nil, "256KiB", size(func(s *Settings) *int64 { return &s.SendBuffer }, 0, 1<<30),
		"The kernel's send buffer of a connection. It bounds the bytes in flight, so that connections share a link evenly; 0 lets the kernel tune it. A fast link with a long round trip needs more: bandwidth times round trip."},
	{"PACELINE_CONGESTION", nil, "reno", text(func(s *Settings) *string { return &s.Congestion }, "a name, or system"),
		"TCP's congestion control of Paceline's connections. Many connections share a link, and under bbr they share it unevenly. system keeps the system's default, which is also used where the kernel does not have this one or does not allow it."},
	{"PACELINE_SYNC", nil, "bsp", among(workers, text(func(s *Settings) *string { return &s.Sync }, "a synchronisation model")),
		"Synchronisation model of optimizers that are not told another: bsp, asp, ssp:S, dsps:LOW,HIGH, pssp:S,C,SEED, dynamic-pssp:S,ALPHA,SEED, drop-stragglers:NT, adaptive:S,W, elastic:R, expression:PULL;PUSH."},
	{"PACELINE_PARKING", nil, "lazy", among(workers, choice(func(s *Settings) *string { return &s.Parking }, "lazy", "soft-barrier")),
		"How long a delayed pull waits under such a model: until its own iteration is closed, or until the next one is."},
	{"PACELINE_SUM_IN_RANK_ORDER", nil, "0", among(nodes, boolean(func(s *Settings) *bool { return &s.SumInRankOrder })),
		"Adds contributions in the order of ranks, so that runs repeat bit for bit."},
	{"PACELINE_COMPRESSION", nil, "", among(workers, text(func(s *Settings) *string { return &s.Compression }, "a codec such as fp16 or topk:0.01, auto, rules in JSON, or the path of a file with rules")),
		"The codec of gradients and held values, where the program names none: " + strings.Join(codec.Names(), ", ") + ". It is used for tensors of 1024 elements or more; with auto, optimizers measure which codec is fastest."},
	{"PACELINE_SEED", nil, "0", among(nodes, integer(func(s *Settings) *int { return &s.Seed }, 0, math.MaxInt)),
		"Seed of the codecs' random numbers. With PACELINE_SUM_IN_RANK_ORDER=1, runs repeat bit for bit."},
	{"PACELINE_CHECK_PARAMETERS", nil, "1000", among(workers, integer(func(s *Settings) *int { return &s.CheckParameters }, 0, math.MaxInt)),
		"Optimizers compare the parameters of all ranks after the first two steps and then after every so many; 0 never does. A difference beyond rounding is an error that names the parameter and the ranks."},
	{"PACELINE_SERVER_MEMORY", nil, "0", size(func(s *Settings) *int64 { return &s.ServerMemory }, 0, math.MaxInt64),
		"Limit of a server's buffers; 0 is half of the machine's memory, divided among its ranks."},
	{"PACELINE_SERVER_SOCKETS", same("BYTEPS_SERVER_ENGINE_THREAD"), "0", integer(func(s *Settings) *int { return &s.ServerSockets }, 0, 1024),
		"Sockets with which a server listens on its port, among which the kernel spreads connections; 0 is one."},
	{"PACELINE_TIMELINE", []synonym{{"HOROVOD_TIMELINE", unless("DYNAMIC")}}, "", text(func(s *Settings) *string { return &s.Timeline }, "a path"),
		"Writes a Chrome trace: rank 0 to trace.json, rank 1 to trace.1.json, and so on."},
	{"PACELINE_START_TIMEOUT", same("HOROVOD_START_TIMEOUT"), "60s", duration(func(s *Settings) *time.Duration { return &s.StartTimeout }, time.Millisecond, maxTime),
		"How long init waits for the others."},
	{"PACELINE_STALL_WARNING", []synonym{{"HOROVOD_STALL_CHECK_DISABLE", ifTrue("0")}, {"HOROVOD_STALL_CHECK_TIME_SECONDS", nil}}, "60s", duration(func(s *Settings) *time.Duration { return &s.StallWarning }, 0, maxTime),
		"After this time a tensor that waits for ranks is reported with their numbers; 0 for never."},
	{"PACELINE_STALL_SHUTDOWN", []synonym{{"HOROVOD_STALL_CHECK_DISABLE", ifTrue("0")}, {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", nil}}, "0s", duration(func(s *Settings) *time.Duration { return &s.StallShutdown }, 0, maxTime),
		"After this time such a tensor ends with an error on every rank; 0 for never. What servers do not answer, though they run, does so a little later."},
	{"PACELINE_PEER_TIMEOUT", nil, "10s", among(nodes, duration(func(s *Settings) *time.Duration { return &s.PeerTimeout }, 50*time.Millisecond, 24*time.Hour)),
		"Within this time a node that falls silent is lost, and in an elastic job the others go on. One that is stopped for half of it is not."},
	{"PACELINE_LOG_LEVEL", same("HOROVOD_LOG_LEVEL", "BYTEPS_LOG_LEVEL"), "warn", level(func(s *Settings) *string { return &s.LogLevel }),
		"What is logged."},
	{"PACELINE_PPROF", nil, "", loopback(func(s *Settings) *string { return &s.Pprof }),
		"Opens the pages of Go's net/http/pprof on loopback, in workers, servers and the scheduler: at this port, or at the next free one. Each process says its address. Every user of the machine can read them."},
	{"PACELINE_REMOTE_SHELL", nil, "ssh", text(func(s *Settings) *string { return &s.RemoteShell }, "a command"),
		"How `paceline run` reaches other hosts; {host} stands for the host's name, which is added at the end where that is missing."},
}

const maxTime = 365 * 24 * time.Hour

// read sets the row's field from the first of its variables with an effect, else to the default.
func (r *row) read(s *Settings, env map[string]string) (warning string, err error) {
	for _, syn := range append(same(r.name), r.synonyms...) {
		given := strings.TrimSpace(env[syn.name])
		value, ok := given, given != ""
		if ok && syn.convert != nil {
			value, ok = syn.convert(s, given)
		}
		if !ok {
			continue
		}
		err := r.kind.parse(s, value)
		if wrong := (argumentError{}); errors.As(err, &wrong) {
			return "", fmt.Errorf("%s: %w", syn.name, wrong.error)
		}
		if err != nil {
			return "", fmt.Errorf("%s=%q: allowed %s%s", syn.name, r.shown(given), r.kind.allowed, r.kind.meant(value))
		}
		s.From[r.name] = syn.name
		if value != given && syn.name == "HOROVOD_FUSION_THRESHOLD" {
			warning = fmt.Sprintf("HOROVOD_FUSION_THRESHOLD=%s: tensors of up to %s bytes share frames here, larger batches bring no gain", given, value)
		}
		return warning, nil
	}
	if r.preset == "" {
		return "", nil
	}
	return "", r.kind.parse(s, r.preset)
}

// shown is a value as an error may show it.
func (r *row) shown(value string) string {
	if r.name == "PACELINE_JOB_SECRET" {
		return strconv.Itoa(len(value)) + " bytes"
	}
	return value
}
