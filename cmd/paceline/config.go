package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/spf13/pflag"
)

// The prefixes of flags for the sections of Horovod's configuration file whose name is not the prefix.
var configPrefixes = map[string]string{
	"params": "", "autotune": "autotune-", "timeline": "timeline-", "stall_check": "stall-check-", "library_options": "", "logging": "log-",
}

// applyConfig sets flags from a configuration file in Horovod's form. Flags on the command line take
// precedence.
func applyConfig(path string, flags *pflag.FlagSet) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var sections map[string]any
	if err := yaml.Unmarshal(text, &sections); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, section := range slices.Sorted(maps.Keys(sections)) {
		if section == "controller" {
			if err := setUnlessGiven(flags, strings.ToLower(fmt.Sprint(sections[section])), true); err != nil {
				return fmt.Errorf("%s: controller: %w", path, err)
			}
			continue
		}
		prefix, known := configPrefixes[section]
		values, isMap := sections[section].(map[string]any)
		if !known || !isMap && sections[section] != nil {
			return fmt.Errorf("%s: %q is not a section: allowed are controller, %s", path, section, strings.Join(slices.Sorted(maps.Keys(configPrefixes)), ", "))
		}
		for _, key := range slices.Sorted(maps.Keys(values)) {
			if err := applyKey(flags, section, prefix, key, values[key]); err != nil {
				return fmt.Errorf("%s: %s: %s: %w", path, section, key, err)
			}
		}
	}
	return nil
}

func applyKey(flags *pflag.FlagSet, section, prefix, key string, value any) error {
	switch {
	case section == "autotune" && key == "enabled":
		return setUnlessGiven(flags, "autotune", value)
	case section == "stall_check" && key == "enabled":
		on, isBool := value.(bool)
		if !isBool {
			return fmt.Errorf("%v is neither true nor false", value)
		}
		return setUnlessGiven(flags, "no-stall-check", !on)
	}
	return setUnlessGiven(flags, prefix+strings.ReplaceAll(key, "_", "-"), value)
}

func setUnlessGiven(flags *pflag.FlagSet, name string, value any) error {
	flag := flags.Lookup(name)
	switch {
	case flag == nil:
		return fmt.Errorf("no such setting (--%s)", name)
	case flag.Changed || value == nil:
		return nil
	case value == false: // a switch that is off was not given
		return nil
	}
	return flags.Set(name, fmt.Sprint(value))
}
