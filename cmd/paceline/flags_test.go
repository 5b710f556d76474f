package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/paceline/paceline/node/settings"
)

func TestHorovodsShortFlagsAreUnderstoodUpToTheCommand(t *testing.T) {
	for given, want := range map[string]string{
		"run -np 4 python -np 3":                           "run --np 4 python -np 3",
		"run -np=4 python":                                 "run --np=4 python",
		"run -np4 -H a:4 python -np3":                      "run --np=4 -H a:4 python -np3",
		"run -H a:1 -np 2 -- -np 3":                        "run -H a:1 --np 2 -- -np 3",
		"run --timeline-filename -np -np 2 x":              "run --timeline-filename -np --np 2 x",
		"run --gloo -hostfile hosts -prefix-timestamp x y": "run --gloo --hostfile hosts --prefix-output-with-timestamp x y",
		"run -cb":                 "run --check-build",
		"sim --model bsp -np 3":   "sim --model bsp --np 3",
		"bench allreduce -np=2,4": "bench allreduce --np=2,4",
		"bench allreduce -np2,4":  "bench allreduce --np=2,4",
		"status":                  "status",
		"run --blacklist-cooldown-range 10 100 -np 2 x": "run --blacklist-cooldown-range=10,100 --np 2 x",
		"run --blacklist-cooldown-range=10,100 x":       "run --blacklist-cooldown-range=10,100 x",
	} {
		if got := strings.Join(longFlags(strings.Fields(given)), " "); got != want {
			t.Errorf("%q: %q", given, got)
		}
	}
}

func TestFlagsBecomeSettings(t *testing.T) {
	for given, want := range map[string]string{
		"--fusion-threshold-mb 0":                 "map[PACELINE_FUSION_BYTES:0]",
		"--fusion-threshold-mb 64":                "map[PACELINE_FUSION_BYTES:131072]",
		"--no-stall-check":                        "map[PACELINE_STALL_SHUTDOWN:0 PACELINE_STALL_WARNING:0]",
		"--stall-check-warning-time-seconds 5":    "map[PACELINE_STALL_WARNING:5]",
		"--stall-check-shutdown-time-seconds 9":   "map[PACELINE_STALL_SHUTDOWN:9]",
		"--log-level WARNING":                     "map[PACELINE_LOG_LEVEL:WARNING]",
		"--timeline-filename t --start-timeout 3": "map[PACELINE_START_TIMEOUT:3 PACELINE_TIMELINE:t]",
		"--autotune --autotune-log-file a.csv":    "map[PACELINE_AUTOTUNE:true PACELINE_AUTOTUNE_LOG:a.csv]",
		"--autotune-steps-per-sample 5":           "map[PACELINE_AUTOTUNE_STEPS_PER_SAMPLE:5]",
		"--autotune-warmup-samples 2":             "map[PACELINE_AUTOTUNE_WARMUP_SAMPLES:2]",
		"--no-autotune --autotune":                "map[PACELINE_AUTOTUNE:0]",
		"--gloo --cycle-time-ms 3":                "map[]",
		"--no-timeline-mark-cycles":               "map[]",
	} {
		flags := runCommand().Flags()
		if err := flags.Parse(strings.Fields(given)); err != nil {
			t.Fatal(err)
		}
		env, err := settingsOf(flags)
		if err != nil || fmt.Sprint(env) != want {
			t.Errorf("%s: %v %v", given, env, err)
		}
		if _, _, err := settings.FromEnv(env); err != nil {
			t.Error(err)
		}
	}
}

func TestElasticFlags(t *testing.T) {
	for given, want := range map[string]string{
		"--np 3":     "<nil>",
		"--min-np 2": "&{2 0  0 0 10m0s [0s 0s]}",
		"--min-num-proc 2 --max-num-proc 4 --host-discovery-script=./h --slots-per-host 2 --reset-limit 5": "&{2 4 ./h 2 5 10m0s [0s 0s]}",
		"--min-np 2 --elastic-timeout 1.5 --blacklist-cooldown-range=10,100":                               "&{2 0  0 0 1.5s [10s 1m40s]}",
		"--reset-limit 5":                            "--reset-limit is for a job whose number of processes may change",
		"--min-np 2 --blacklist-cooldown-range 5":    "give two numbers of seconds",
		"--min-np 2 --blacklist-cooldown-range=-1,5": "give two numbers of seconds",
	} {
		var e elasticFlags
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		flags.Int("np", 0, "")
		e.add(flags)
		if err := flags.Parse(strings.Fields(given)); err != nil {
			t.Fatal(err)
		}
		got, err := e.given(flags)
		if text := fmt.Sprint(got); err == nil && text != want || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %s %v", given, text, err)
		}
	}
}

// TestEveryFlagOfHorovodrunIsThere lists them as horovodrun's users know them.
func TestEveryFlagOfHorovodrunIsThere(t *testing.T) {
	flags := runCommand().Flags()
	for name := range strings.FieldsSeq(`np num-proc hosts hostfile host-discovery-script ssh-port ssh-identity-file network-interfaces network-interface
		start-timeout output-filename prefix-output-with-timestamp verbose config-file check-build disable-cache fusion-threshold-mb cycle-time-ms cache-capacity
		hierarchical-allreduce no-hierarchical-allreduce hierarchical-allgather no-hierarchical-allgather autotune no-autotune autotune-log-file
		autotune-warmup-samples autotune-steps-per-sample autotune-bayes-opt-max-samples autotune-gaussian-process-noise
		min-np min-num-proc max-np max-num-proc slots-per-host elastic-timeout reset-limit blacklist-cooldown-range
		timeline-filename timeline-mark-cycles no-timeline-mark-cycles no-stall-check stall-check stall-check-warning-time-seconds stall-check-shutdown-time-seconds
		mpi-threads-disable no-mpi-threads-disable mpi-args tcp binding-args num-nccl-streams thread-affinity gloo-timeout-seconds
		log-level log-with-timestamp log-without-timestamp gloo mpi jsrun`) {
		if flags.Lookup(name) == nil {
			t.Errorf("--%s", name)
		}
	}
	for _, short := range "HpinH" {
		if flags.ShorthandLookup(string(short)) == nil {
			t.Errorf("-%c", short)
		}
	}
}

func TestConfigFileGivesFlagsThatWereNotGiven(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	os.WriteFile(path, []byte(`
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10
  hierarchical_allreduce: true
autotune:
  enabled: true
  log_file: 'a.txt'
timeline:
  filename: 'file.json'
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  num_nccl_streams: 2
  ccl_bgt_affinity: 1
logging:
  level: INFO
  hide_timestamp: true
`), 0o600)
	flags := runCommand().Flags()
	if err := flags.Parse([]string{"--timeline-filename", "mine.json"}); err != nil {
		t.Fatal(err)
	}
	if err := applyConfig(path, flags); err != nil {
		t.Fatal(err)
	}
	env, err := settingsOf(flags)
	want := "map[PACELINE_AUTOTUNE:true PACELINE_AUTOTUNE_LOG:a.txt PACELINE_FUSION_BYTES:131072 PACELINE_LOG_LEVEL:INFO PACELINE_STALL_SHUTDOWN:0 PACELINE_STALL_WARNING:0 PACELINE_TIMELINE:mine.json]"
	if err != nil || fmt.Sprint(env) != want {
		t.Fatal(env, err)
	}
	names := given(flags, idleFlags)
	if !slices.Contains(names, "--gloo") || !slices.Contains(names, "--log-hide-timestamp") || !slices.Contains(names, "--timeline-mark-cycles") {
		t.Fatal(names)
	}
}

func TestConfigFileErrorsNameThePlace(t *testing.T) {
	for text, want := range map[string]string{
		"params:\n  speed: 3":           "params: speed: no such setting",
		"nonsense:\n  a: 1":             `"nonsense" is not a section`,
		"params: 3":                     `"params" is not a section`,
		"stall_check:\n  enabled: much": "stall_check: enabled: much is neither true nor false",
		"a: [":                          "config.yaml",
		"controller: carrier-pigeon":    "controller: no such setting (--carrier-pigeon)",
	} {
		path := filepath.Join(t.TempDir(), "config.yaml")
		os.WriteFile(path, []byte(text), 0o600)
		if err := applyConfig(path, runCommand().Flags()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
