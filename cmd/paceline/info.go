package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"golang.org/x/sys/cpu"

	"github.com/paceline/paceline/cmd/paceline/launch"
	"github.com/paceline/paceline/internal/iface"
	"github.com/paceline/paceline/internal/version"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/fabric"
)

// facts is the output of `paceline info`.
type facts struct {
	Version    string            `json:"version"`
	Revision   string            `json:"revision,omitempty"`
	Go         string            `json:"go"`
	Platform   string            `json:"platform"`
	Cores      int               `json:"cores"`
	CPU        []string          `json:"cpu_features"`
	Interfaces []iface.Interface `json:"interfaces"`
	Fabrics    []fabric.Device   `json:"fabrics,omitempty"` // of libfabric, where it is installed
	Settings   []settings.Value  `json:"settings"`
	Warnings   []string          `json:"warnings,omitempty"`
	Error      string            `json:"error,omitempty"` // of the settings
}

func infoCommand() *cobra.Command {
	var output jsonSwitch
	c := &cobra.Command{
		Use:   "info",
		Short: "Show the build, the machine, and the settings with where each came from",
		Args:  noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			f, err := gather(launch.Variables(os.Environ()))
			if err != nil {
				return err
			}
			return output.show(c, f, f.show)
		},
	}
	output.add(c)
	return c
}

func gather(env map[string]string) (facts, error) {
	f := facts{Version: version.String(), Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH, Cores: runtime.NumCPU(), CPU: cpuFeatures()}
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, s := range build.Settings {
			if s.Key == "vcs.revision" {
				f.Revision = s.Value
			}
		}
	}
	var err error
	if f.Interfaces, err = iface.List(); err != nil {
		return f, err
	}
	f.Fabrics, _ = fabric.Devices() // there are none without libfabric
	s, warnings, err := settings.FromEnv(env)
	if err != nil {
		f.Error = err.Error()
		return f, nil
	}
	f.Settings, f.Warnings = s.Values(), warnings
	return f, nil
}

// cpuFeatures names the available instructions among those that the kernels use.
func cpuFeatures() []string {
	var names []string
	for _, one := range []struct {
		name string
		has  bool
	}{
		{"avx", cpu.X86.HasAVX}, {"avx2", cpu.X86.HasAVX2}, {"fma", cpu.X86.HasFMA}, {"avx512f", cpu.X86.HasAVX512F}, {"avx512bw", cpu.X86.HasAVX512BW},
		{"avx512bf16", cpu.X86.HasAVX512BF16}, {"asimd", cpu.ARM64.HasASIMD}, {"sve", cpu.ARM64.HasSVE},
	} {
		if one.has {
			names = append(names, one.name)
		}
	}
	return names
}

func (f *facts) show(out io.Writer) {
	fmt.Fprintf(out, "paceline %s %s (%s, %s)\n", f.Version, f.Revision, f.Go, f.Platform)
	fmt.Fprintf(out, "%d cores: %s\n", f.Cores, strings.Join(f.CPU, " "))
	for _, one := range f.Interfaces {
		fmt.Fprintf(out, "interface %s: %s, mtu %d\n", one.Name, strings.Join(one.Addresses, " "), one.MTU)
	}
	for _, one := range f.Fabrics {
		fmt.Fprintf(out, "fabric %s: %s\n", one.Provider, one.Name)
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, v := range f.Settings {
		fmt.Fprintf(table, "%s\t%s\t%s\n", v.Name, v.Value, v.From)
	}
	table.Flush()
	for _, w := range f.Warnings {
		fmt.Fprintf(out, "warning: %s\n", w)
	}
	if f.Error != "" {
		fmt.Fprintf(out, "error: %s\n", f.Error)
	}
}
