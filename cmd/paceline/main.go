// Command paceline starts jobs and their servers and schedulers, and shows information about them.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/paceline/paceline/internal/version"
)

func main() { os.Exit(execute(os.Args[1:])) }

// exitCode ends the command with a code; the reason was already reported.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

func execute(args []string) int {
	root := &cobra.Command{
		Use:           "paceline",
		Short:         "Data-parallel training over ordinary Ethernet",
		Version:       version.String(),
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          onlyCommands,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SetFlagErrorFunc(badFlag)
	root.PersistentPreRunE = func(c *cobra.Command, _ []string) error { return noEmptyFlags(c) }
	root.SetVersionTemplate("paceline {{.Version}}\n")
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(runCommand(), schedulerCommand(), serverCommand(), drainCommand(), serversCommand(), envCommand(), statusCommand(), topCommand(), infoCommand(), benchCommand(), simCommand(), timelineCommand())
	root.SetArgs(longFlags(args))
	command, err := root.ExecuteC()
	var code exitCode
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", command.CommandPath(), err)
	return 1
}
