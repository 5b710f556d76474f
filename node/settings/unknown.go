package settings

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/paceline/paceline/internal/nearest"
)

// Variables that the Python package reads, and those by which our launcher speaks to what it starts: to servers, and to processes of a job
// that changes its size.
var elsewhere = []string{
	"PACELINE_LIBRARY", "PACELINE_TAKEOVER", "PACELINE_TENSORFLOW_SYNC", "PACELINE_LAUNCHED", "PACELINE_ELASTIC_PROCESS", "PACELINE_ELASTIC_ROUND", "PACELINE_ELASTIC_TIMEOUT",
}

// Variables of the other systems that do not affect how a job runs: their launchers set them for themselves,
// their builds read them, or they ask for what always holds (process sets can always be added after init).
var harmless = []string{
	"HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_GLOO_", "HOROVOD_WITH_", "HOROVOD_WITHOUT_", "HOROVOD_GPU", "HOROVOD_NCCL_HOME",
	"HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "HOROVOD_NCCL_LINK", "HOROVOD_CUDA_", "HOROVOD_ROCM_", "HOROVOD_BUILD_", "HOROVOD_DEBUG", "HOROVOD_NUM_NCCL_STREAMS", "HOROVOD_MPICXX_SHOW", "HOROVOD_DYNAMIC_PROCESS_SETS",
	"BYTEPS_WITH_", "BYTEPS_WITHOUT_", "BYTEPS_NCCL_", "BYTEPS_CUDA_", "BYTEPS_USE_HASH_KEY", "DMLC_ENABLE_RDMA", "DMLC_USE_KUBERNETES",
}

// unknown warns of variables that are set and have no effect: one line for all variables of other systems
// without a counterpart, and one for each PACELINE_ variable that does not exist.
func unknown(env map[string]string) []string {
	known := knownNames()
	var foreign, warnings []string
	for _, name := range slices.Sorted(maps.Keys(env)) {
		switch prefix, _, _ := strings.Cut(name, "_"); {
		case known[name] || env[name] == "":
		case prefix == "PACELINE":
			warnings = append(warnings, fmt.Sprintf("%s is set, but there is no such setting: did you mean %s?", name, nearestOf(name, known)))
		case (prefix == "HOROVOD" || prefix == "DMLC" || prefix == "BYTEPS") && !isHarmless(name):
			foreign = append(foreign, name)
		}
	}
	if len(foreign) > 0 {
		warnings = append(warnings, "these variables are set and have no effect here: "+strings.Join(foreign, ", "))
	}
	return warnings
}

func knownNames() map[string]bool {
	known := map[string]bool{"DMLC_PS_ROOT_URI": true, "DMLC_PS_ROOT_PORT": true}
	for _, name := range elsewhere {
		known[name] = true
	}
	for _, row := range Table() {
		known[row.Name] = true
		for _, name := range row.Synonyms {
			known[name] = true
		}
	}
	return known
}

func isHarmless(name string) bool {
	return slices.ContainsFunc(harmless, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// nearestOf is the setting of ours that begins with the words of a name, or has them, or else the one whose name differs in the fewest letters.
func nearestOf(name string, known map[string]bool) string {
	var names []string
	for _, k := range slices.Sorted(maps.Keys(known)) {
		if strings.HasPrefix(k, ours) {
			names = append(names, k)
		}
	}
	words := strings.TrimPrefix(name, ours) + "_"
	for _, start := range []string{ours, "_"} {
		if i := slices.IndexFunc(names, func(k string) bool { return strings.Contains(k+"_", start+words) }); i >= 0 {
			return names[i]
		}
	}
	return nearest.Of(name, names)
}
