package settings

import (
	"bytes"
	"errors"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/iface"
)

const testSecret = "0123456789abcdef0123"

type env = map[string]string

func read(t *testing.T, e env) Settings {
	t.Helper()
	s, _, err := FromEnv(e)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestDefaultsAreOneWorkerAlone(t *testing.T) {
	s, warnings, err := FromEnv(nil)
	if err != nil || len(warnings) > 0 {
		t.Fatal(warnings, err)
	}
	if s.Rank != 0 || s.Size != 1 || s.LocalSize != 1 || s.CrossSize != 1 || s.EmbedScheduler != "127.0.0.1:0" || s.Scheduler != "" || !s.Local {
		t.Fatalf("%+v", s)
	}
	if s.PartitionBytes != 0 || s.FusionBytes != 64<<10 || s.CreditBytes != 16<<20 || s.Connections != 1 || s.StartTimeout != time.Minute ||
		s.StallWarning != time.Minute || s.StallShutdown != 0 || s.PeerTimeout != 10*time.Second ||
		s.LogLevel != "warn" || s.Servers != "embedded" || s.RemoteShell != "ssh" {
		t.Fatalf("%+v", s)
	}
}

func TestEveryDefaultIsAllowed(t *testing.T) {
	for _, row := range table {
		if row.preset == "" {
			continue
		}
		if err := row.kind.parse(&Settings{}, row.preset); err != nil {
			t.Errorf("%s: default %q is refused", row.name, row.preset)
		}
	}
}

func TestProfilesAreOnLoopback(t *testing.T) {
	for given, want := range map[string]string{"": "", "6060": "127.0.0.1:6060", "localhost:6060": "localhost:6060", "[::1]:0": "[::1]:0"} {
		if s := read(t, env{"PACELINE_PPROF": given}); s.Pprof != want {
			t.Errorf("PACELINE_PPROF=%s gives %q, want %q", given, s.Pprof, want)
		}
	}
}

func TestWhoAndWhereUnderEachLauncher(t *testing.T) {
	torchrun := env{"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "PACELINE_JOB_SECRET": testSecret}
	for _, c := range []struct {
		name                             string
		env                              env
		launcher                         string
		rank, size, lrank, lsize, cr, cs int
		scheduler, embed                 string
		local                            bool
	}{
		{"torchrun over two hosts", torchrun, "torchrun", 1, 4, 1, 2, 0, 2, "node1:29501", "", false},
		{"torchrun, rank 0", with(torchrun, env{"RANK": "0", "LOCAL_RANK": "0"}), "torchrun", 0, 4, 0, 2, 0, 2, "node1:29501", "node1:29501", false},
		{"torchrun on one host", with(torchrun, env{"WORLD_SIZE": "2", "PACELINE_JOB_SECRET": "", "GROUP_WORLD_SIZE": "1"}), "torchrun", 1, 2, 1, 2, 0, 1, "127.0.0.1:29501", "", true},
		{"torchrun with a port of ours", with(torchrun, env{"PACELINE_PORT": "7000"}), "torchrun", 1, 4, 1, 2, 0, 2, "node1:7000", "", false},
		{"torchrun with a scheduler that runs", with(torchrun, env{"PACELINE_SCHEDULER": "cpu1:7000", "RANK": "0"}), "torchrun", 0, 4, 1, 2, 0, 2, "cpu1:7000", "", false},
		{"torchrun under srun", with(torchrun, env{"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}), "torchrun", 1, 4, 1, 2, 0, 2, "node1:29501", "", false},
		{"rank and size alone", env{"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "40000"}, "torchrun", 1, 2, -1, -1, -1, -1, "127.0.0.1:23617", "", true},
		{"mpirun on one host", env{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "123@1"}, "mpirun", 1, 2, 1, 2, -1, -1, "127.0.0.1:*", "", true},
		{"mpirun over hosts", env{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PACELINE_SCHEDULER": "10.0.0.1:7000", "PACELINE_JOB_SECRET": testSecret}, "mpirun", 3, 4, 1, 2, -1, -1, "10.0.0.1:7000", "", false},
		{"mpiexec of MPICH", env{"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PACELINE_PORT": "7001"}, "mpiexec", 0, 2, 0, 2, -1, -1, "127.0.0.1:7001", "127.0.0.1:7001", true},
		{"srun", env{"SLURM_PROCID": "3", "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "gpu[03-05]", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "PACELINE_JOB_SECRET": testSecret}, "srun", 3, 5, 1, 2, 1, 3, "gpu03:*", "", false},
		{"srun, with the size that its script has exported", env{"WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "77"}, "srun", 1, 2, 1, 2, 0, 1, "127.0.0.1:*", "", true},
		{"PMI without local numbers in a batch script of Slurm", env{"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "localhost", "PACELINE_PORT": "7001"}, "mpiexec", 0, 2, -1, -1, -1, -1, "127.0.0.1:7001", "127.0.0.1:7001", true},
		{"srun --mpi=pmi2", env{"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "77"}, "srun", 1, 2, 1, 2, 0, 1, "127.0.0.1:*", "", true},
		{"mpiexec of MPICH in a step of Slurm", env{"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "PACELINE_PORT": "7001"}, "mpiexec", 1, 2, 1, 2, -1, -1, "127.0.0.1:7001", "", true},
		{"srun, with the size that its script has exported", env{"WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "77"}, "srun", 1, 2, 1, 2, 0, 1, "127.0.0.1:*", "", true},
		{"PMI without local numbers in a batch script of Slurm", env{"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "localhost", "PACELINE_PORT": "7001"}, "mpiexec", 0, 2, -1, -1, -1, -1, "127.0.0.1:7001", "127.0.0.1:7001", true},
		{"an older srun", env{"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "77"}, "srun", 1, 2, 1, 2, 0, -1, "127.0.0.1:*", "", true},
		{"a batch script of Slurm is no step", env{"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}, "", 0, 1, 0, 1, 0, 1, "", "127.0.0.1:0", true},
		{"horovodrun", env{"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1", "PACELINE_SCHEDULER": "127.0.0.1:9"}, "horovodrun", 1, 2, 1, 2, 0, 1, "127.0.0.1:9", "", true},
		{"bpslaunch", env{"DMLC_WORKER_ID": "1", "DMLC_NUM_WORKER": "2", "BYTEPS_LOCAL_RANK": "3", "BYTEPS_LOCAL_SIZE": "4", "DMLC_PS_ROOT_URI": "10.0.0.9", "DMLC_PS_ROOT_PORT": "1234", "DMLC_NUM_SERVER": "2", "PACELINE_JOB_SECRET": testSecret}, "byteps", 7, 8, 3, 4, 1, 2, "10.0.0.9:1234", "", false},
		{"paceline run", env{"PACELINE_RANK": "1", "PACELINE_SIZE": "2", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "PACELINE_LOCAL_RANK": "1", "PACELINE_LOCAL_SIZE": "2", "PACELINE_SCHEDULER": "127.0.0.1:9"}, "paceline", 1, 2, 1, 2, -1, -1, "127.0.0.1:9", "", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := read(t, c.env)
			got := []int{s.Rank, s.Size, s.LocalRank, s.LocalSize, s.CrossRank, s.CrossSize}
			for i, want := range []int{c.rank, c.size, c.lrank, c.lsize, c.cr, c.cs} {
				if got[i] != want {
					t.Errorf("rank size local local cross cross: %v, want %d at %d", got, want, i)
				}
			}
			scheduler := s.Scheduler
			if strings.HasSuffix(c.scheduler, ":*") {
				scheduler = scheduler[:strings.LastIndex(scheduler, ":")] + ":*"
			}
			if s.Launcher != c.launcher || scheduler != c.scheduler || s.EmbedScheduler != c.embed || s.Local != c.local {
				t.Errorf("launcher %q scheduler %q embed %q local %v", s.Launcher, s.Scheduler, s.EmbedScheduler, s.Local)
			}
		})
	}
}

func TestTheSchedulerMayBeAtSeveralAddresses(t *testing.T) {
	secret := env{"PACELINE_SIZE": "2", "PACELINE_RANK": "0", "PACELINE_JOB_SECRET": testSecret}
	with := func(schedulers string) env {
		e := maps.Clone(secret)
		e["PACELINE_SCHEDULER"] = schedulers
		return e
	}
	if s := read(t, with("127.0.0.1:7000, 127.0.0.1:7001")); s.Scheduler != "127.0.0.1:7000,127.0.0.1:7001" || !s.Local {
		t.Errorf("scheduler %q local %v", s.Scheduler, s.Local)
	}
	if s := read(t, with("127.0.0.1:7000,a:1")); s.Local {
		t.Error("a job with a scheduler on another host is local")
	}
	for bad, want := range map[string]string{
		"a:1,":                            "up to 8 of them, separated by commas",
		"a:1,b":                           "up to 8",
		"a:1,a:1":                         "up to 8",
		"a:1,b:0":                         "port 0",
		strings.Repeat("a:1,", 8) + "b:1": "up to 8",
	} {
		if _, _, err := FromEnv(with(bad)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", bad, err, want)
		}
	}
	local := with("127.0.0.1:7000,127.0.0.1:7001")
	delete(local, "PACELINE_JOB_SECRET")
	if _, _, err := FromEnv(local); err == nil || !strings.Contains(err.Error(), "PACELINE_JOB_SECRET") {
		t.Errorf("without a secret: %v", err)
	}
}

func TestBytePSJobUsesDedicatedServers(t *testing.T) {
	s := read(t, env{"DMLC_WORKER_ID": "0", "DMLC_NUM_WORKER": "2", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "1234", "DMLC_NUM_SERVER": "3",
		"BYTEPS_PARTITION_BYTES": "4096000", "BYTEPS_SCHEDULING_CREDIT": "4", "BYTEPS_LOG_LEVEL": "WARNING", "BYTEPS_SERVER_ENGINE_THREAD": "8"})
	if s.Servers != "dedicated" || s.NumServers != 3 || s.PartitionBytes != 4096000 || s.CreditBytes != 4*4096000 || s.LogLevel != "warn" || s.ServerSockets != 8 || s.Size != 2 {
		t.Fatalf("%+v", s)
	}
}

func TestHorovodSettingsAreHonoured(t *testing.T) {
	s, warnings, err := FromEnv(env{"HOROVOD_FUSION_THRESHOLD": "67108864", "HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2.5",
		"HOROVOD_TIMELINE": "/tmp/t.json", "HOROVOD_LOG_LEVEL": "trace", "HOROVOD_START_TIMEOUT": "30", "HOROVOD_GLOO_IFACE": "eth7", "HOROVOD_HOSTNAME": "h", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_WITH_PYTORCH": "1"})
	if err != nil {
		t.Fatal(err)
	}
	if s.FusionBytes != 128<<10 || s.StallWarning != 2500*time.Millisecond || s.StallShutdown != 2500*time.Millisecond || s.Timeline != "/tmp/t.json" || s.LogLevel != "debug" ||
		s.StartTimeout != 30*time.Second || s.Interface != "eth7" || s.Host != "h" {
		t.Fatalf("%+v", s)
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0], "HOROVOD_FUSION_THRESHOLD=67108864") {
		t.Fatal(warnings)
	}
	if s := read(t, env{"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "a.csv", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "7"}); !s.Autotune || s.AutotuneLog != "a.csv" || s.AutotuneSteps != 7 || s.AutotuneWarmup != 3 {
		t.Fatal(s.Autotune, s.AutotuneLog, s.AutotuneSteps, s.AutotuneWarmup)
	}
	read(t, env{"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "0"}) // Horovod's for none
	if s := read(t, env{"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "240"}); s.StallWarning != 0 || s.StallShutdown != 0 {
		t.Fatal(s.StallWarning)
	}
	if s := read(t, env{"HOROVOD_STALL_CHECK_DISABLE": "0", "HOROVOD_STALL_CHECK_TIME_SECONDS": "7"}); s.StallWarning != 7*time.Second {
		t.Fatal(s.StallWarning)
	}
	if s := read(t, env{"HOROVOD_STALL_CHECK_DISABLE": "1", "PACELINE_STALL_WARNING": "2m"}); s.StallWarning != 2*time.Minute {
		t.Fatal("our own name comes first:", s.StallWarning)
	}
}

func TestVariablesWithoutEffectAreNamedOnce(t *testing.T) {
	_, warnings, err := FromEnv(env{"HOROVOD_CYCLE_TIME": "1", "HOROVOD_TIMELINE_MARK_CYCLES": "1", "HOROVOD_DYNAMIC_PROCESS_SETS": "1", "BYTEPS_ENABLE_ASYNC": "1", "PACELINE_PARTITION_BYTE": "1", "HOME": "/"})
	for word, meant := range map[string]string{"LOG": "PACELINE_LOG_LEVEL", "SECRET": "PACELINE_JOB_SECRET", "TLS": "PACELINE_TLS_CA", "PEER_TIMOUT": "PACELINE_PEER_TIMEOUT"} {
		if got := unknown(env{"PACELINE_" + word: "1"}); len(got) != 1 || !strings.HasSuffix(got[0], "did you mean "+meant+"?") {
			t.Errorf("PACELINE_%s: %q", word, got)
		}
	}
	want := []string{"PACELINE_PARTITION_BYTE is set, but there is no such setting: did you mean PACELINE_PARTITION_BYTES?",
		"these variables are set and have no effect here: BYTEPS_ENABLE_ASYNC, HOROVOD_CYCLE_TIME, HOROVOD_TIMELINE_MARK_CYCLES"}
	if err != nil || strings.Join(warnings, "\n") != strings.Join(want, "\n") {
		t.Fatal(warnings, err)
	}
}

// TestOneProcessOfAHostSpeaks: a server that was started beside the workers does not, but one that was started by hand does.
func TestOneProcessOfAHostSpeaks(t *testing.T) {
	for _, c := range []struct {
		env    env
		speaks bool
	}{
		{nil, true},
		{env{"PACELINE_RANK": "2", "PACELINE_SIZE": "4", "PACELINE_LOCAL_RANK": "0", "PACELINE_LOCAL_SIZE": "2"}, true},
		{env{"PACELINE_RANK": "3", "PACELINE_SIZE": "4", "PACELINE_LOCAL_RANK": "1", "PACELINE_LOCAL_SIZE": "2"}, false},
		{env{"PACELINE_RANK": "0", "PACELINE_SIZE": "4"}, true}, // of which host, nobody knows yet
		{env{"PACELINE_RANK": "3", "PACELINE_SIZE": "4"}, false},
		{env{"PACELINE_ROLE": "server"}, true},
		{env{"PACELINE_ROLE": "server", "PACELINE_LAUNCHED": "1"}, false},
		{env{"PACELINE_ROLE": "scheduler"}, true},
	} {
		full := env{"PACELINE_SCHEDULER": "127.0.0.1:1"}
		maps.Copy(full, c.env)
		if s := read(t, full); s.Speaks() != c.speaks {
			t.Errorf("%v: %v, want %v", c.env, s.Speaks(), c.speaks)
		}
	}
}

func TestBadValuesNameVariableValueAndWhatIsAllowed(t *testing.T) {
	for _, c := range []struct {
		env  env
		want string
	}{
		{env{"PACELINE_PARTITION_BYTES": "12"}, `PACELINE_PARTITION_BYTES="12": allowed are 64 KiB to 256 MiB, as a number of bytes or with KiB, MiB, GiB`},
		{env{"BYTEPS_PARTITION_BYTES": "many"}, `BYTEPS_PARTITION_BYTES="many": allowed are 64 KiB`},
		{env{"PACELINE_SERVERS": "some"}, `PACELINE_SERVERS="some": allowed are embedded, dedicated, both`},
		{env{"PACELINE_PLACEMENT": "psld:2"}, `PACELINE_PLACEMENT: placement "psld:2": EPSILON is "2", allowed`},
		{env{"PACELINE_PLACEMENT": "psdl:0.2"}, `, psld (did you mean "psld"?)`},
		{env{"PACELINE_CONNECTIONS": "0"}, `PACELINE_CONNECTIONS="0": allowed are 1 to 64`},
		{env{"PACELINE_PEER_TIMEOUT": "soon"}, `PACELINE_PEER_TIMEOUT="soon": allowed are 50ms to 24h0m0s`},
		{env{"PACELINE_STALL_WARNING": "-1"}, `PACELINE_STALL_WARNING="-1": allowed is a number of seconds`},
		{env{"PACELINE_STALL_WARNING": "NaN"}, `PACELINE_STALL_WARNING="NaN"`},
		{env{"PACELINE_SUM_IN_RANK_ORDER": "2"}, `PACELINE_SUM_IN_RANK_ORDER="2": allowed are 1 and 0`},
		{env{"PACELINE_PPROF": "0.0.0.0:6060"}, `PACELINE_PPROF="0.0.0.0:6060": allowed is a port, or host:port on loopback`},
		{env{"PACELINE_PPROF": ":6060"}, `PACELINE_PPROF=":6060": allowed is a port`},
		{env{"PACELINE_PPROF": "65536"}, `PACELINE_PPROF="65536": allowed is a port`},
		{env{"PACELINE_SCHEDULER": "host"}, `PACELINE_SCHEDULER="host": allowed is host:port`},
		{env{"PACELINE_SCHEDULER": "host:0"}, `PACELINE_SCHEDULER="host:0": port 0`},
		{env{"PACELINE_JOB_SECRET": "hush"}, `PACELINE_JOB_SECRET="4 bytes": allowed are 16 to 4096 bytes`},
		{env{"PACELINE_JOB_SECRET": testSecret + "\xff"}, "PACELINE_JOB_SECRET: the secret is no text in UTF-8"},
		{env{"PACELINE_JOB_SECRET": testSecret + "\ufffd"}, "PACELINE_JOB_SECRET: the secret is no text in UTF-8"}, // of Python
		{env{"WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, `WORLD_SIZE="4" is set, but RANK is not`},
		{env{"RANK": "1"}, `RANK="1" is set, but WORLD_SIZE is not: set both or none`},
		{env{"HOROVOD_SIZE": "2"}, `HOROVOD_SIZE="2" is set, but HOROVOD_RANK is not`},
		{env{"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of torchrun in a job of 2: ranks count from 0"},
		{env{"RANK": "x", "WORLD_SIZE": "2"}, `RANK="x": allowed are 0 to 16384`},
		{env{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 is more than the job's 2 workers"},
		{env{"RANK": "0", "WORLD_SIZE": "2"}, "rank 0 of 2 does not know the scheduler's address: set PACELINE_SCHEDULER=host:port, or MASTER_ADDR"},
		{env{"WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, `WORLD_SIZE="4" is set, but RANK is not`},
		{env{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "the ranks have to agree on a port for the scheduler: set PACELINE_PORT"},
		{env{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "0"}, `MASTER_PORT="0": allowed are 1 to 65535`},
		{env{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "so it needs a secret: set PACELINE_JOB_SECRET or PACELINE_JOB_SECRET_FILE"},
		{env{"PACELINE_ROLE": "server"}, "a server needs the scheduler's address: set PACELINE_SCHEDULER=host:port"},
		{env{"DMLC_PS_ROOT_URI": "a"}, `DMLC_PS_ROOT_URI="a" with DMLC_PS_ROOT_PORT="": set both`},
		{env{"PACELINE_TLS_CERT": "a.pem"}, "TLS needs all of"},
	} {
		if _, _, err := FromEnv(c.env); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v\n got: %v\nwant: %s", c.env, err, c.want)
		}
	}
	_, _, err := FromEnv(env{"PACELINE_SERVERS": "x", "PACELINE_CONNECTIONS": "x"})
	if err == nil || !strings.Contains(err.Error(), "PACELINE_SERVERS") || !strings.Contains(err.Error(), "PACELINE_CONNECTIONS") {
		t.Fatal("not every wrong value is named:", err)
	}
}

func TestDerivedPortIsNeverMasterPortAndBelowTheEphemeralOnes(t *testing.T) {
	for master := range 65536 {
		if p := derivedPort(uint32(master) + 1); p == master || p < 16384 || p > 32767 {
			t.Fatal(master, p)
		}
	}
}

func TestSizesAndDurations(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "123": 123, "4MiB": 4 << 20, "4 mb": 4 << 20, "1.5G": 3 << 29, "64K": 64 << 10} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Error(text, got, err)
		}
	}
	for _, text := range []string{"", "x", "-1", "9223372036854775807G", "1e300", "NaN"} {
		if got, err := ParseSize(text); err == nil {
			t.Error(text, got)
		}
	}
	for text, want := range map[string]time.Duration{"2": 2 * time.Second, "0.5": time.Second / 2, "3m": 3 * time.Minute} {
		if got, err := parseDuration(text); err != nil || got != want {
			t.Error(text, got, err)
		}
	}
}

func TestRanksOfALocalJobFindTheSameSecretAndOtherJobsAnother(t *testing.T) {
	dir := t.TempDir()
	job := env{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "a", "XDG_RUNTIME_DIR": dir}
	secrets := func(e env) []byte {
		s := read(t, e)
		if err := s.Complete(); err != nil {
			t.Fatal(err)
		}
		return s.JobSecret
	}
	one := secrets(job)
	if !bytes.Equal(one, secrets(with(job, env{"RANK": "1", "LOCAL_RANK": "1"}))) {
		t.Fatal("ranks of one job differ")
	}
	if bytes.Equal(one, secrets(with(job, env{"TORCHELASTIC_RUN_ID": "b"}))) || bytes.Equal(one, secrets(with(job, env{"MASTER_PORT": "29510"}))) {
		t.Fatal("jobs share a secret")
	}
	scheduler := env{"PACELINE_ROLE": "scheduler", "PACELINE_SCHEDULER": "127.0.0.1:7000", "XDG_RUNTIME_DIR": dir}
	if !bytes.Equal(secrets(scheduler), secrets(with(job, env{"PACELINE_SCHEDULER": "127.0.0.1:7000"}))) {
		t.Fatal("a worker and the scheduler started by hand differ")
	}
	server := env{"PACELINE_ROLE": "server", "PACELINE_SCHEDULER": "127.0.0.1:29501", "XDG_RUNTIME_DIR": dir}
	if !bytes.Equal(secrets(server), secrets(with(job, env{"PACELINE_SERVERS": "dedicated", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}))) {
		t.Fatal("a worker and a server of a scheduler in rank 0 differ")
	}
}

func TestSecretComesFromItsFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	os.WriteFile(path, []byte(testSecret+"\n"), 0o600)
	s := read(t, env{"PACELINE_SCHEDULER": "10.0.0.1:7", "PACELINE_JOB_SECRET_FILE": path})
	if err := s.Complete(); err != nil || string(s.JobSecret) != testSecret {
		t.Fatal(err)
	}
	os.WriteFile(path, []byte(" "+testSecret+" \n"), 0o600)
	spaced := read(t, env{"PACELINE_SCHEDULER": "10.0.0.1:7", "PACELINE_JOB_SECRET": " " + testSecret + " \n"})
	if s.JobSecret = nil; s.Complete() != nil || !bytes.Equal(s.JobSecret, spaced.JobSecret) {
		t.Errorf("a file gives %q, a variable with the same content %q", s.JobSecret, spaced.JobSecret)
	}
	os.Chmod(path, 0o640)
	s.JobSecret = nil
	if err := s.Complete(); err == nil || !strings.Contains(err.Error(), "run chmod 600 "+path) {
		t.Fatal(err)
	}
	s = read(t, env{"PACELINE_SCHEDULER": "10.0.0.1:7", "PACELINE_JOB_SECRET_FILE": "/no/such/file"})
	if err := s.Complete(); err == nil || !strings.Contains(err.Error(), "PACELINE_JOB_SECRET_FILE: open /no/such/file") {
		t.Fatal(err)
	}
}

func TestCompleteKnowsTheMachine(t *testing.T) {
	s := read(t, env{"XDG_RUNTIME_DIR": t.TempDir()})
	if err := s.Complete(); err != nil || s.Host == "" || s.ServerMemory < 1<<20 {
		t.Fatalf("%v %+v", err, s)
	}
	if host, err := s.ListenHost(); err != nil || host != "127.0.0.1" {
		t.Fatal(host, err)
	}
	s.Interface = "no-such0"
	s.From["PACELINE_INTERFACE"] = "HOROVOD_GLOO_IFACE"
	if _, err := s.ListenHost(); err == nil || !strings.Contains(err.Error(), `HOROVOD_GLOO_IFACE: no interface or address "no-such0"`) {
		t.Fatal(err)
	}
}

// Hosts of Debian resolve their own names to 127.0.1.1: all processes there use the address that other hosts have.
func TestAHostWhoseNameLeadsToLoopbackIsReachedByItsAddress(t *testing.T) {
	own, err := iface.Outward()
	if err != nil {
		t.Skip(err) // a machine with nothing but loopback
	}
	hosts := func(name string) ([]net.IP, error) { // as on host1
		switch name {
		case "host1":
			return []net.IP{net.IPv4(127, 0, 1, 1)}, nil
		case "host1-twice": // getaddrinfo's order is any
			return []net.IP{net.IPv4(127, 0, 1, 1), net.ParseIP(own)}, nil
		case "host2":
			return []net.IP{net.IPv4(203, 0, 113, 2)}, nil
		case "service": // in rank 0's process it leads here by a translation
			return []net.IP{net.IPv4(203, 0, 113, 9)}, nil
		}
		return nil, errors.New("no such host")
	}
	torchrun := env{"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host1", "MASTER_PORT": "29500", "PACELINE_JOB_SECRET": testSecret}
	second := with(torchrun, env{"RANK": "1", "LOCAL_RANK": "1"})
	listens := env{"PACELINE_ROLE": "scheduler", "PACELINE_JOB_SECRET": testSecret}
	server := with(listens, env{"PACELINE_ROLE": "server"})
	lo := env{"PACELINE_INTERFACE": "lo"}
	for _, c := range []struct {
		env                env
		scheduler, listens string // host:port, and at which address
	}{
		{torchrun, own + ":29501", own},
		{second, own + ":29501", own},
		{with(torchrun, env{"MASTER_ADDR": "host1-twice"}), own + ":29501", own},
		{with(second, env{"MASTER_ADDR": "host1-twice"}), own + ":29501", own},
		{with(torchrun, env{"MASTER_ADDR": "localhost"}), own + ":29501", own},
		{with(second, env{"MASTER_ADDR": "localhost"}), own + ":29501", own},
		{with(torchrun, env{"MASTER_ADDR": "localhost", "PACELINE_JOB_SECRET": ""}), "127.0.0.1:29501", "127.0.0.1"}, // two agents of torchrun on one host
		{with(second, env{"MASTER_ADDR": "127.0.0.1", "PACELINE_SERVERS": "dedicated"}), "127.0.0.1:29501", "127.0.0.1"},
		{with(torchrun, env{"MASTER_ADDR": "service"}), own + ":29501", own},
		{with(second, env{"MASTER_ADDR": "service"}), "service:29501", ""},
		{with(torchrun, lo), "127.0.0.1:29501", "127.0.0.1"},
		{with(second, lo), "127.0.0.1:29501", "127.0.0.1"},
		{with(listens, env{"PACELINE_SCHEDULER": "host1:7000"}), own + ":7000", own},
		{with(listens, env{"PACELINE_SCHEDULER": "localhost:7000"}), "localhost:7000", "127.0.0.1"},
		{with(server, env{"PACELINE_SCHEDULER": "host1:7000"}), own + ":7000", own},
		{with(server, env{"PACELINE_SCHEDULER": "127.0.0.1:7000"}), "127.0.0.1:7000", "127.0.0.1"},
		{with(server, env{"PACELINE_SCHEDULER": "host2:7000,host1:7000"}), "host2:7000," + own + ":7000", ""},
		{with(server, env{"PACELINE_SCHEDULER": "nobody:7000"}), "nobody:7000", ""},
	} {
		s := read(t, c.env)
		for range 2 { // it may be called again
			if err := s.complete(hosts); err != nil {
				t.Fatal(c.env, err)
			}
		}
		if s.Scheduler != c.scheduler || s.EmbedScheduler != "" && s.EmbedScheduler != c.scheduler {
			t.Errorf("%v: scheduler %q embed %q, want %s", c.env, s.Scheduler, s.EmbedScheduler, c.scheduler)
		}
		if host, err := s.ListenHost(); c.listens != "" && (err != nil || host != c.listens) {
			t.Errorf("%v: it listens at %q, %v, want %s", c.env, host, err, c.listens)
		}
	}
	s := read(t, with(server, env{"PACELINE_SCHEDULER": "host2:7000"}))
	for address, want := range map[string]string{"host1:7001": own + ":7001", "localhost:7001": "localhost:7001", "127.0.0.1:7001": "127.0.0.1:7001", ":7001": ":7001", "0.0.0.0:7001": "0.0.0.0:7001"} {
		if got, err := s.reached(address, hosts); err != nil || got != want {
			t.Errorf("a server that listens at %s is reached at %q, %v", address, got, err)
		}
	}
	s.Interface = "no-such0"
	if _, err := s.reached("host1:7001", hosts); err == nil || !strings.Contains(err.Error(), `no interface or address "no-such0"`) {
		t.Error(err)
	}
}

func TestEachRankHasItsOwnTimeline(t *testing.T) {
	for rank, want := range map[int]string{0: "a/trace.json", 3: "a/trace.3.json"} {
		if got := TimelinePath("a/trace.json", rank); got != want {
			t.Error(got)
		}
	}
	if TimelinePath("", 2) != "" || TimelinePath("trace", 2) != "trace.2" {
		t.Error("no name or no ending")
	}
	s := read(t, env{"RANK": "1", "WORLD_SIZE": "2", "PACELINE_SCHEDULER": "127.0.0.1:9", "PACELINE_TIMELINE": "t.json"})
	if s.Timeline != "t.1.json" {
		t.Error(s.Timeline)
	}
	s = read(t, env{"RANK": "1", "WORLD_SIZE": "2", "PACELINE_SCHEDULER": "127.0.0.1:9", "PACELINE_TIMELINE": "t.json", "PACELINE_AUTOTUNE_LOG": "log", "PACELINE_ELASTIC_ROUND": "3"})
	if s.Timeline != "t.round3.1.json" || s.AutotuneLog != "log.round3" {
		t.Error(s.Timeline, s.AutotuneLog)
	}
}

func TestValuesTellWhereEachSettingCameFromAndHideSecrets(t *testing.T) {
	s := read(t, env{"BYTEPS_PARTITION_BYTES": "1MiB", "PACELINE_JOB_SECRET": testSecret, "RANK": "0", "WORLD_SIZE": "1"})
	found := map[string]Value{}
	for _, v := range s.Values() {
		found[v.Name] = v
		if strings.Contains(v.Value, testSecret) {
			t.Fatal("secret shown")
		}
	}
	if len(found) != len(Table()) {
		t.Fatal(len(found), len(Table()))
	}
	for name, want := range map[string]Value{
		"PACELINE_PARTITION_BYTES": {"PACELINE_PARTITION_BYTES", "1 MiB", "BYTEPS_PARTITION_BYTES"},
		"PACELINE_RANK":            {"PACELINE_RANK", "0", "RANK"},
		"PACELINE_CONNECTIONS":     {"PACELINE_CONNECTIONS", "1", "default"},
		"PACELINE_JOB_SECRET":      {"PACELINE_JOB_SECRET", "(set)", "PACELINE_JOB_SECRET"},
	} {
		if found[name] != want {
			t.Errorf("%+v", found[name])
		}
	}
}

func with(base, more env) env {
	all := env{}
	for _, e := range []env{base, more} {
		for k, v := range e {
			all[k] = v
		}
	}
	return all
}

func TestSettingsOfTheProgramTakeThePlaceOfVariables(t *testing.T) {
	s, _, err := From(env{"PACELINE_SYNC": "asp", "HOROVOD_LOG_LEVEL": "error"}, map[string]any{
		"sync": "ssp:3", "log_level": "debug", "partition_bytes": float64(4 << 20), "sum_in_rank_order": true, "placement": "",
	})
	if err != nil || s.Sync != "ssp:3" || s.LogLevel != "debug" || s.PartitionBytes != 4<<20 || !s.SumInRankOrder || s.Placement != "" {
		t.Fatalf("%+v, %v", s, err)
	}
	if s.From["PACELINE_SYNC"] != "init" {
		t.Errorf("PACELINE_SYNC is from %q", s.From["PACELINE_SYNC"])
	}
	for _, c := range []struct {
		given map[string]any
		want  string
	}{
		{map[string]any{"partiton_bytes": "1MiB"}, `there is no setting "partiton_bytes": did you mean "partition_bytes"?`},
		{map[string]any{"PACELINE_SYNC": "bsp"}, `there is no setting "PACELINE_SYNC": did you mean "sync"?`},
		{map[string]any{"partition_bytes": "much"}, `PACELINE_PARTITION_BYTES="much": allowed`},
		{map[string]any{"sync": []any{}}, `setting "sync": [] is not a text, number or boolean`},
	} {
		if _, _, err := From(env{}, c.given); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %s", c.given, err, c.want)
		}
	}
}

func TestWhatMustAgreeIsInTheTable(t *testing.T) {
	names := func(e env) string {
		s := read(t, e)
		return strings.Join(slices.Sorted(maps.Keys(s.Alike())), " ")
	}
	everywhere := "PACELINE_ELASTIC PACELINE_PEER_TIMEOUT PACELINE_SEED PACELINE_SUM_IN_RANK_ORDER"
	if got := names(env{"PACELINE_ROLE": "server", "PACELINE_SCHEDULER": "127.0.0.1:7000"}); got != everywhere {
		t.Errorf("a server states %s, want %s", got, everywhere)
	}
	want := "PACELINE_AUTOTUNE PACELINE_AUTOTUNE_STEPS_PER_SAMPLE PACELINE_AUTOTUNE_WARMUP_SAMPLES PACELINE_CHECK_PARAMETERS PACELINE_COMPRESSION PACELINE_ELASTIC PACELINE_PARKING PACELINE_PARTITION_BYTES PACELINE_PEER_TIMEOUT PACELINE_SEED PACELINE_SUM_IN_RANK_ORDER PACELINE_SYNC"
	if got := names(env{}); got != want {
		t.Errorf("a worker states %s, want %s", got, want)
	}
	for _, searched := range []string{"PACELINE_CREDIT_BYTES", "PACELINE_FUSION_BYTES", "PACELINE_CONNECTIONS"} {
		s := read(t, env{"PACELINE_AUTOTUNE": "1"})
		if s.Alike()[searched] == "" {
			t.Errorf("a worker that autotunes does not state %s, with which its search begins", searched)
		}
	}
	s := read(t, env{"PACELINE_SUM_IN_RANK_ORDER": "1", "PACELINE_PARTITION_BYTES": "1MiB"})
	if a := s.Alike(); a["PACELINE_SUM_IN_RANK_ORDER"] != "true" || a["PACELINE_PARTITION_BYTES"] != "1 MiB" {
		t.Errorf("stated as %v", a)
	}
}
