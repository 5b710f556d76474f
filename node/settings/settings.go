// Package settings turns a process's environment into the settings of the engine.
//
// One table (table.go) lists the variables, their allowed values and defaults. The process's identity comes
// from the launcher's variables (identity.go); the scheduler's address and the source of the job's secret follow
// from both (rendezvous.go). FromEnv is a pure function of the environment; Complete adds the machine's own data.
package settings

import (
	"errors"
	"time"
)

// Settings are the settings of one process. Times are durations, sizes bytes.
type Settings struct {
	// The process's identity. Local and cross numbers that the launcher did not give are -1: they follow
	// from the hosts in the roster.
	Role         string `json:"role"` // "worker", "server" or "scheduler"
	Rank         int    `json:"rank"`
	Size         int    `json:"size"`
	LocalRank    int    `json:"local_rank"`
	LocalSize    int    `json:"local_size"`
	CrossRank    int    `json:"cross_rank"`
	CrossSize    int    `json:"cross_size"`
	Host         string `json:"host"`                    // name of this machine for people, equal for its ranks; Complete sets it
	ElasticRound uint64 `json:"elastic_round,omitempty"` // by the count of a launcher whose job changes its size; 0 under others
	Launcher     string `json:"launcher"`                // whose variables gave the rank: "paceline", "torchrun", ...; "" for none
	Launched     bool   `json:"-"`                       // of a server: `paceline run` has started it, beside the workers

	// The rendezvous of the job.
	Scheduler      string `json:"scheduler"`       // host:port to dial, or several, separated by commas; "" for this process's own, whose port is known once it listens
	EmbedScheduler string `json:"embed_scheduler"` // host:port of the scheduler that this process runs; "" if another does. Complete makes the host an address to bind to
	Standby        bool   `json:"standby"`         // a worker's: the scheduler may move while the job runs
	Port           int    `json:"port"`            // of a scheduler in rank 0; 0 for a derived one
	Local          bool   `json:"local"`           // every rank is on this host: listeners bind to loopback
	Interface      string `json:"interface"`       // name or address to bind to and to be reached at; "" for the interface towards the scheduler

	JobSecret  []byte `json:"-"`           // Complete sets it from SecretFile, or for a local job from SecretDir
	SecretFile string `json:"secret_file"` // file that holds the secret, given by the user
	SecretDir  string `json:"secret_dir"`  // directory of the user's own shared secret, for a local job without one
	SecretFor  string `json:"-"`           // distinguishes this local job from the user's others in SecretDir

	TLSCert string `json:"tls_cert"` // paths of PEM files; TLS is used where they are given
	TLSKey  string `json:"tls_key"`
	TLSCA   string `json:"tls_ca"`

	Integrity string `json:"integrity"` // what has authentication tags on connections without TLS: "control", "all", or "" for all between hosts

	// Servers.
	Servers         string        `json:"servers"`          // "embedded", "dedicated" or "both"
	NumServers      int           `json:"num_servers"`      // dedicated servers that the job waits for; 0: the scheduler's number
	HostSums        bool          `json:"host_sums"`        // workers of one host with all servers elsewhere sum among themselves first
	Placement       string        `json:"placement"`        // as core/placement reads it; "": the scheduler's choice
	PlacementPeriod time.Duration `json:"placement_period"` // between two reports of how fast servers are; 0: none
	Elastic         bool          `json:"elastic"`          // the job goes on without workers and servers that are lost
	ServerMemory    int64         `json:"server_memory"`    // bound of a server's buffers; Complete replaces 0 by a share of the machine's memory
	ServerSockets   int           `json:"server_sockets"`   // that listen; 0: one

	// The path of a gradient.
	PartitionBytes int64  `json:"partition_bytes"` // 0: the worker chooses by the servers
	FusionBytes    int64  `json:"fusion_bytes"`    // payload of a frame in which small tensors travel together; 0: each alone
	CreditBytes    int64  `json:"credit_bytes"`    // pushed to one server and not yet reported as consumed
	Connections    int    `json:"connections"`     // from a worker to each server
	Transport      string `json:"transport"`       // "local": shared memory inside a host where the machine has it; "tcp" alone, "shm", "fabric", or "auto": all that the machine has
	ShmRing        int64  `json:"shm_ring"`        // of each direction of a connection in shared memory
	Fabric         string `json:"fabric"`          // provider of libfabric; "" for the first one with hardware
	SendBuffer     int64  `json:"send_buffer"`     // of the kernel for a connection; 0: as the kernel tunes it
	Congestion     string `json:"congestion"`      // TCP's congestion control, or "system"
	Sync           string `json:"sync"`
	Parking        string `json:"parking"`
	Autotune       bool   `json:"autotune"`        // while training runs, ranks search for the four of these numbers that are fastest
	AutotuneLog    string `json:"autotune_log"`    // path of the log of its trials, which rank 0 writes; "" for none
	AutotuneWarmup int    `json:"autotune_warmup"` // trials that are not measured
	AutotuneSteps  int    `json:"autotune_steps"`  // of a trial
	SumInRankOrder bool   `json:"sum_in_rank_order"`
	Compression    string `json:"compression"` // a codec, rules or the path of a file with them (core/policy); "" for plain
	Seed           int    `json:"seed"`        // of the random numbers that codecs draw

	CheckParameters int `json:"check_parameters"` // optimizers compare parameters between ranks every so many steps; 0: never

	// Timeline is the file of this rank's trace, its own on each rank (TimelinePath); "" for none.
	Timeline string `json:"timeline"`

	// Deadlines.
	StartTimeout  time.Duration `json:"start_timeout"`
	StallWarning  time.Duration `json:"stall_warning"`  // 0: never
	StallShutdown time.Duration `json:"stall_shutdown"` // 0: never
	PeerTimeout   time.Duration `json:"peer_timeout"`

	Pprof       string `json:"pprof"`        // host:port on loopback of the pages of net/http/pprof; "" for none
	LogLevel    string `json:"log_level"`    // "debug", "info", "warn", "error" or "fatal"
	RemoteShell string `json:"remote_shell"` // of `paceline run`

	// From gives the variable behind each setting, by the setting's name; a default has no entry.
	From map[string]string `json:"-"`
}

// FromEnv reads the settings of a process from its environment. Warnings are for the user to see once;
// the error names every faulty variable, its value and the allowed values.
func FromEnv(env map[string]string) (Settings, []string, error) {
	s := Settings{From: map[string]string{}}
	var warnings []string
	var problems []error
	for _, row := range table {
		warning, err := row.read(&s, env)
		if warning != "" {
			warnings = append(warnings, warning)
		}
		problems = append(problems, err)
	}
	problems = append(problems, identify(&s, env))
	if err := errors.Join(problems...); err != nil {
		return Settings{}, warnings, err
	}
	s.Timeline = TimelinePath(roundPath(s.Timeline, s.ElasticRound), s.Rank)
	s.AutotuneLog = roundPath(s.AutotuneLog, s.ElasticRound)
	if err := errors.Join(rendezvous(&s, env), agree(&s)); err != nil {
		return Settings{}, warnings, err
	}
	return s, append(warnings, unknown(env)...), nil
}

// agree reports settings that are not allowed together.
func agree(s *Settings) error {
	if (s.TLSCert == "") != (s.TLSKey == "") || s.TLSCert != "" && s.TLSCA == "" {
		return errors.New("TLS needs all of PACELINE_TLS_CERT, PACELINE_TLS_KEY and PACELINE_TLS_CA")
	}
	if s.StallShutdown > 0 && s.StallShutdown < s.StallWarning {
		s.StallWarning = s.StallShutdown // Horovod's scripts set only the shutdown
	}
	return nil
}

// Speaks reports whether this process shows the warnings about the environment: one rank of each host does, because a
// launcher gives all of them the same, and the servers that it starts, too. Where hosts are not known yet, it is rank 0.
func (s *Settings) Speaks() bool {
	return !s.Launched && (s.LocalRank == 0 || s.LocalRank < 0 && s.Rank == 0)
}
